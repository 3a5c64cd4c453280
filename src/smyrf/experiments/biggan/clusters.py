"""Cluster memberships of the pixels of generated images, as in the paper's figure.

Shapes: B images, S × S pixels of an attention block.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from smyrf.experiments.biggan.calls import generator_calls
from smyrf.experiments.biggan.networks import Generator, attention_blocks
from smyrf.methods import Method
from smyrf.tools.analysis.cluster_grids import check_clustering, cluster_grids


def cluster_maps(
    generator: Generator,
    z: Tensor,
    classes: Tensor | None,
    methods: Sequence[Method],
    *,
    block: int = -1,
    seed: int = 0,
) -> tuple[Tensor, list[Tensor]]:
    """Generate images with dense attention, and find the cluster of every query pixel by each method.

    Args:
        z, classes: inputs of the generator.
        block: index of the attention block.
        seed: seed of hashes.

    Returns:
        images ``(B, colours, R, R)``, and cluster indices ``(B, S, S)`` for each method.

    Raises:
        ValueError: there is no such attention block, or a method has no clusters.
    """
    n_blocks = len(list(attention_blocks(generator)))
    if not -n_blocks <= block < n_blocks:
        raise ValueError(f"{block=} must be one of the generator's {n_blocks} attention blocks")
    check_clustering(methods)
    images, calls = generator_calls(generator, z, classes)
    return images, cluster_grids(calls[block], methods, seed=seed)
