"""Write images: a plain grid, or labelled rows of the same latents with different attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from smyrf.atomic_write import replacing

# Pixels between images, and the minimum size of an image: small ones are enlarged by nearest neighbour.
_GAP, _LEAST = 2, 64


def to_bytes(images: Tensor) -> Tensor:
    """Convert images ``(n, colours, R, R)`` between −1 and 1 to uint8 ``(n, 3, R, R)``.

    Example:
        >>> import torch
        >>> to_bytes(torch.tensor([-1.0, 0.0, 1.0]).reshape(3, 1, 1, 1))[:, 0, 0, 0]
        tensor([  0, 128, 255], dtype=torch.uint8)
    """
    pixels = ((images.float() + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return pixels.expand(-1, 3, -1, -1) if images.shape[1] == 1 else pixels


def tile(images: Tensor, n_columns: int | None = None) -> Tensor:
    """Arrange images ``(n, colours, R, R)`` in a grid on white, uint8 ``(3, height, width)``.

    Args:
        n_columns: number of columns; by default the grid is square.
    """
    pixels = to_bytes(images)
    n_columns = math.ceil(math.sqrt(len(pixels))) if n_columns is None else n_columns
    scale = max(1, _LEAST // pixels.shape[2])
    pixels = F.interpolate(pixels.float(), scale_factor=scale).to(torch.uint8)
    size, n_rows = pixels.shape[2] + _GAP, math.ceil(len(pixels) / n_columns)
    found = torch.full((3, n_rows * size + _GAP, n_columns * size + _GAP), 255, dtype=torch.uint8)
    for number, one in enumerate(pixels):
        top, left = (_GAP + size * place for place in divmod(number, n_columns))
        found[:, top : top + size - _GAP, left : left + size - _GAP] = one
    return found


def save_image(pixels: Tensor, path: Path) -> None:
    """Write a uint8 image ``(3, height, width)`` as PNG, atomically."""
    from PIL import Image

    with replacing(path) as temporary:
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(temporary, format="PNG")


def save_comparison(rows: Sequence[tuple[str, Tensor]], path: Path, title: str) -> list[Path]:
    """Write the paper's figure, a row per method with the same latents, to `path`.png and .svg.

    Args:
        rows: pairs of a label and images ``(n, colours, R, R)``.
    """
    from matplotlib.figure import Figure

    from smyrf.tools.plotting import save_figure

    n_images = len(rows[0][1])
    # In inches: room for the widest label, a cell per image, a line for the title.
    left = 0.2 + 0.085 * max(len(line) for label, _ in rows for line in label.splitlines())
    right, height = left + 1.05 * n_images, 0.4 + 1.15 * len(rows)
    width = max(right, 0.2 + 0.095 * len(title))
    figure = Figure(figsize=(width, height))
    edges = {"left": left / width, "right": right / width, "bottom": 0.0, "top": 1.0 - 0.4 / height}
    axes = figure.subplots(len(rows), 1, squeeze=False, gridspec_kw={**edges, "hspace": 0.08})[:, 0]
    for one, (label, images) in zip(axes, rows, strict=True):
        one.imshow(tile(images, n_images).permute(1, 2, 0).numpy(), interpolation="nearest")
        one.set_yticks([])
        one.set_xticks([])
        one.spines[:].set_visible(False)
        one.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
    figure.suptitle(title, fontsize=10, x=0.1 / width, y=1.0 - 0.1 / height, ha="left", va="top", parse_math=False)
    return save_figure(figure, path)
