"""Images of a generator: one grid, or the paper's figure, the same latents with different attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smyrf.experiments.biggan.grids import save_comparison, save_image, tile
from smyrf.experiments.biggan.latents import draw_classes, draw_latents, generate
from smyrf.experiments.biggan.networks import Generator, restored_methods, set_method
from smyrf.methods import Dense, Method


@dataclass(frozen=True)
class Row:
    """Images with one attention.

    Args:
        images: ``(n, colours, R, R)`` between −1 and 1.
        share: key visits of a query in the attention blocks, relative to dense attention; the mean over blocks.
        distance: root mean square difference to the images with dense attention, relative to their own.
    """

    method: Method
    images: Tensor
    share: float
    distance: float

    @property
    def label(self) -> str:
        """Method and memory, in two lines."""
        return (
            self.method.label
            if isinstance(self.method, Dense)
            else f"{self.method.label}\n{100 * self.share:.3g}% memory"
        )


def memory_share(generator: Generator, method: Method) -> float:
    """The paper's memory of a method in the attention blocks of a generator, the mean over blocks.

    Example:
        >>> from smyrf.experiments.biggan.config import Config
        >>> from smyrf.methods import Smyrf
        >>> small = Generator(Config(resolution=64, channels=1, n_latent=6, attention=(64,)))
        >>> memory_share(small, Smyrf(64, 32))
        0.5
    """
    shares = []
    for size in generator.config.attention:
        n_queries = size * size
        shares.append(method.memory_share(n_queries // 4, n_queries))
    if isinstance(method, Dense):
        return 1.0
    if not shares:
        raise ValueError(f"the generator has no attention block for {method.label}")
    return sum(shares) / len(shares)


def compare(
    generator: Generator,
    methods: Sequence[Method],
    n_images: int,
    *,
    classes: list[int] | None = None,
    truncation: float | None = None,
    seed: int = 0,
    batch: int = 8,
    track: Any = iter,
) -> list[Row]:
    """The same latents and classes with each method; the generator is left with the attention that it had.

    Args:
        classes: used in turn; any by default.
        truncation: of the latents.
        seed: of latents, classes and hashes.
        track: wraps the methods, to show progress.

    Raises:
        ValueError: there is no attention block, or no such class.
    """
    z = draw_latents(n_images, generator.config.n_latent, truncation=truncation, seed=seed)
    numbers = draw_classes(n_images, generator, classes, seed)
    shares = {method: memory_share(generator, method) for method in methods}
    rows: list[Row] = []
    with restored_methods(generator):
        set_method(generator, Dense())
        dense = generate(generator, z, numbers, batch)
        remaining: Iterable[Method] = track(methods)
        for method in remaining:
            set_method(generator, method, seed)
            images = dense if isinstance(method, Dense) else generate(generator, z, numbers, batch)
            length = torch.linalg.vector_norm(dense).clamp_min(torch.finfo(dense.dtype).tiny)  # images may be all zero
            distance = torch.linalg.vector_norm(images - dense) / length
            rows.append(Row(method, images, shares[method], float(distance)))
    return rows


def write_images(rows: Sequence[Row], path: Path, title: str) -> list[Path]:
    """Writes a plain grid of a single row, or the paper's figure of several; says what it wrote."""
    if len(rows) > 1:
        return save_comparison([(row.label, row.images) for row in rows], path, title)
    file = path.with_name(path.name + ".png")
    save_image(tile(rows[0].images), file)
    return [file]
