"""Select near keys and fold the others in the extension: the descent of the torch backend with a fused level.

Shapes: as in `smyrf.backends.torch.selection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smyrf.backends.forward_mode import refuse_forward_mode
from smyrf.backends.native.level import fold_level
from smyrf.backends.torch import selection as descent
from smyrf.call import Call
from smyrf.grouping.stages import Selection, Tree
from smyrf.methods import Level


def select_and_fold(call: Call, tree: Tree, levels: tuple[Level, ...]) -> Selection:
    """Near keys and far keys of each leaf (`smyrf.grouping.stages.SelectAndFold`)."""
    refuse_forward_mode((call.k, call.v), "backend='native'", "pass backend='reference'")
    return descent.run(_select_and_fold, call, tree, levels)


@torch.library.custom_op("smyrf::select_and_fold_native", mutates_args=(), device_types="cpu")
def _select_and_fold(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    queries: Tensor,
    keys: Tensor,
    leaf_of_key: Tensor,
    scale: float,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    levels = descent.read_levels(sizes)
    results = descent.empty_results(q, k, v, levels)
    leaves, side = descent.all_statistics(q, k, v, key_mask, queries, keys, leaf_of_key, scale)

    def fold(places: Tensor | None, level: Level, centroids: Tensor, spread: Tensor, own: int, *out: Tensor) -> None:
        fold_level(k, v, key_mask, *side[:4], places, centroids, spread, level, own, *out)

    descent.descend(levels, leaves, side, descent.every_row(key_mask, q), results, fold)
    return results


@_select_and_fold.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
    return descent.empty_results(q, k, v, descent.read_levels(args[-1]))


descent.register_gradient(_select_and_fold)
