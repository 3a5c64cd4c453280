"""A level of Tangent attention in the extension: fused, without a matrix of scores.

Shapes: as in `smyrf.grouping.tangent.levels`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smyrf.backends.native import extension
from smyrf.backends.torch.candidates import Candidates
from smyrf.methods.levels import Level


def keep_and_fold(
    keys: Candidates,
    level: Level,
    centroids: Tensor,
    spread: Tensor,
    known: tuple[Tensor, Tensor, Tensor],
    leaves_of_own: int,
    kept: Tensor,
    vectors: Tensor,
    bias: Tensor,
) -> None:
    """Arguments as for `smyrf.grouping.tangent.levels.keep_and_fold`."""
    width = centroids.shape[-1]
    candidates = None if keys.everything else keys.candidates
    tensors = [centroids, spread, keys.vectors, candidates, keys.hidden, *known, kept, vectors, bias]
    tensors = [None if x is None else x.contiguous() for x in tensors]
    extension.native.fold_level(
        centroids.dtype == torch.float64,
        [
            *centroids.shape[:2],
            level.n_clusters,
            keys.candidates.shape[1],
            width,
            keys.vectors.shape[-1] - width,
            level.n_near,
            level.n_far,
            leaves_of_own,
        ],
        [0 if x is None else x.data_ptr() for x in tensors],
        extension.n_threads(),
        extension.ISA,
    )
