"""Which cluster each pixel of a generated image asks in: the paper's figure of memberships.

Shapes: B images, H × W pixels of an attention block, N = H·W queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smyrf.analysis.reach import query_clusters
from smyrf.biggan.grids import to_bytes
from smyrf.biggan.networks import Generator, attention_blocks, restored_methods, set_method
from smyrf.grouping import group
from smyrf.methods import Dense, Method, PerHead, Smyrf, method_label
from smyrf.seeds import draw_seed


@torch.no_grad()
def cluster_maps(
    generator: Generator,
    z: Tensor,
    classes: Tensor | None,
    methods: Sequence[Method],
    *,
    block: int = -1,
    seed: int = 0,
) -> tuple[Tensor, list[Tensor]]:
    """Images, and for each method the cluster of every query pixel.

    Of several hashing rounds the first is shown; of several levels the last, in which queries ask.

    Args:
        z, classes: of the images, as for the generator.
        block: which of its attention blocks.
        seed: of hashes.

    Returns:
        images ``(B, colours, R, R)``, made with dense attention, and cluster numbers ``(B, H, W)`` for each method,
        in the order in which a method sorts them.

    Raises:
        ValueError: there is no such attention block, or a method that has no clusters.
    """
    blocks = list(attention_blocks(generator))
    if not -len(blocks) <= block < len(blocks):
        raise ValueError(f"{block=} must be one of the generator's {len(blocks)} attention blocks")
    for method in methods:
        if isinstance(method, Dense | PerHead):
            raise ValueError(f"{method_label(method)} has no clusters")
    seen: list[Tensor] = []
    handle = blocks[block].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    training = generator.training
    generator.eval()
    try:
        with restored_methods(generator):
            set_method(generator, Dense())
            images = generator(z, classes)
        q, k, v = blocks[block].project(seen[0])
    finally:
        handle.remove()
        generator.train(training)
    maps = []
    for method in methods:
        groups = group(q, k, v, method, seed=draw_seed(seed), scale=1.0)
        numbers = query_clusters(groups[0 if isinstance(method, Smyrf) else -1], q.shape[2])  # (B, N)
        maps.append(numbers.reshape(len(q), *seen[0].shape[2:]))
    return images, maps


def plot_clusters(images: Tensor, maps: Sequence[Tensor], methods: Sequence[Method], path: Path) -> list[Path]:
    """Writes `path`.png and `path`.svg: images on top, below them the clusters of their pixels by each method."""
    from matplotlib.figure import Figure

    from smyrf.figures import save_figure

    n_rows, n_images = 1 + len(maps), len(images)
    figure = Figure(figsize=(1.5 + 1.5 * n_images, 0.3 + 1.5 * n_rows), layout="constrained")
    axes: Any = figure.subplots(n_rows, n_images, squeeze=False)
    for column, image in enumerate(to_bytes(images)):
        axes[0, column].imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
    for row, (method, numbers) in enumerate(zip(methods, maps, strict=True), 1):
        n_clusters = int(numbers.max()) + 1
        # Two clusters as in the paper, grey and white; more by their place in the sorted order.
        colours = "gray" if n_clusters <= 2 else "turbo"
        for column in range(n_images):
            axes[row, column].imshow(
                numbers[column].numpy(), cmap=colours, vmin=-0.6 * (n_clusters <= 2), vmax=n_clusters - 1
            )
        axes[row, 0].set_ylabel(f"{method_label(method)}\n{n_clusters} clusters", fontsize=8)
    for one in axes.flat:
        one.set_xticks([])
        one.set_yticks([])
        one.spines[:].set_visible(False)
    return save_figure(figure, path)
