"""Images beside the clusters of their pixels or patches, and the clusters of a transformers model that reads images.

Shapes: B images, R × R pixels, S × S queries of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smyrf.methods import Method
from smyrf.models.calls import find_call
from smyrf.tools.analysis.cluster_grids import cluster_grids
from smyrf.tools.encoders import load_pretrained, load_processor
from smyrf.tools.inspect.command import Loaded
from smyrf.tools.plotting import new_figure, save_figure

# Numbers of tokens before the patches, registers excepted: none, class, class and distillation (DeiT).
LEADING = (0, 1, 2)


def image_clusters(
    loaded: Loaded, methods: Sequence[Method], *, layer: int = 0, head: int = 0, seed: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Images as a model sees them, and the cluster of each of their patches under each method.

    Class and register tokens are left out.

    Returns:
        images ``(B, colours, R, R)`` between −1 and 1, and cluster numbers ``(B, S, S)`` for each method.

    Raises:
        ValueError: there is no such layer or head, the model reads no images, or the queries of this layer are not the
            patches of a square image.
    """
    if loaded.kind != "images":
        raise ValueError(f"reads {loaded.kind}, which has no patches to show")
    call = find_call(loaded.calls, layer, head)
    pixels = loaded.inputs.batches[0]["pixel_values"]
    if pixels.dim() != 4 or pixels.shape[2] != pixels.shape[3]:
        raise ValueError(f"reads images as {tuple(pixels.shape)}, not as (images, colours, side, side)")
    if len(call.q) != len(pixels):
        raise ValueError(f"{layer=} attends within {len(call.q)} parts of {len(pixels)} images, not within images")
    n_leading = _leading(loaded.name, call.n_queries, pixels.shape[3])
    if n_leading is None:
        raise ValueError(
            f"{layer=} has {call.n_queries} queries for images of {pixels.shape[3]}×{pixels.shape[3]} pixels, which "
            "are not a square grid of patches with class or register tokens before it"
        )
    maps = cluster_grids(call, methods, head=head, n_leading=n_leading, seed=seed)
    return _seen(pixels, load_processor(loaded.name, "images")), maps


def plot_clusters(
    images: Tensor, maps: Sequence[Tensor], methods: Sequence[Method], path: Path, title: str = ""
) -> list[Path]:
    """Write `path`.png and `path`.svg: images on top, below them the clusters of their pixels under each method.

    Args:
        images: ``(B, colours, R, R)`` between −1 and 1.
        maps: cluster numbers ``(B, S, S)`` for each method.
    """
    n_rows, n_images = 1 + len(maps), len(images)
    lines = title.splitlines()
    width = max([1.5 + 1.5 * n_images, *(0.08 * len(line) for line in lines)])
    size = (width, 0.3 + 1.5 * n_rows + 0.2 * len(lines))
    figure, axes = new_figure(n_rows, n_images, size=size, title=title)
    for column, image in enumerate((images.float() + 1.0) / 2.0):
        shown = image.clamp(0.0, 1.0).expand(3, -1, -1).permute(1, 2, 0)  # (R, R, 3)
        axes[0, column].imshow(shown.numpy(), interpolation="nearest")
    for row, (method, numbers) in enumerate(zip(methods, maps, strict=True), 1):
        n_clusters = int(numbers.max()) + 1
        # Two clusters in grey and white, as in the paper; more by their index in sorting order.
        colours = "gray" if n_clusters <= 2 else "turbo"
        for column in range(n_images):
            axes[row, column].imshow(
                numbers[column].numpy(), cmap=colours, vmin=-0.6 * (n_clusters <= 2), vmax=max(1, n_clusters - 1)
            )
        axes[row, 0].set_ylabel(f"{method.label}\n{n_clusters} cluster{'s' * (n_clusters > 1)}", fontsize=8)
    for one in axes.flat:
        one.set_xticks([])
        one.set_yticks([])
        one.spines[:].set_visible(False)
    return save_figure(figure, path)


def _leading(name: str, n_queries: int, n_pixels: int) -> int | None:
    """Number of tokens before the patches; None if it cannot be determined."""
    from transformers import AutoConfig

    config: Any = load_pretrained(AutoConfig, name, "its config ")
    vision = getattr(config, "vision_config", None) or config  # of a model with two towers
    n_registers = getattr(vision, "num_register_tokens", None) or 0
    patch = getattr(vision, "patch_size", None)
    # Some models drop patches: a square number of remaining ones is not a grid.
    side = n_pixels // patch if isinstance(patch, int) and patch > 0 else math.isqrt(n_queries)
    n_leading = n_queries - side * side
    return n_leading if side > 1 and n_leading in (*LEADING, *(n + n_registers for n in LEADING)) else None


def _seen(pixels: Tensor, processor: Any) -> Tensor:
    """Undo the normalization of a processor: images between −1 and 1, cropped as the model sees them."""
    pixels = pixels.float()
    if getattr(processor, "do_normalize", False):
        mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (processor.image_mean, processor.image_std))
        pixels = pixels * std + mean
    if not getattr(processor, "do_rescale", True):  # bytes
        pixels = pixels / 255.0
    return 2.0 * pixels - 1.0
