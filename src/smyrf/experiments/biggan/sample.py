"""Sample images of a generator with different attention methods, from the same latents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smyrf.experiments.biggan.grids import save_comparison, save_image, tile
from smyrf.experiments.biggan.latents import draw_inputs, generate
from smyrf.experiments.biggan.networks import Generator, restored_methods, set_method
from smyrf.methods import Dense, Method


@dataclass(frozen=True)
class MethodImages:
    """Images generated with one attention method.

    Args:
        images: ``(n, colours, R, R)`` between −1 and 1.
        share: key visits per query, relative to dense attention, averaged over attention blocks.
        distance: ‖images − dense‖ / ‖dense‖, with the images of dense attention.
    """

    method: Method
    images: Tensor
    share: float
    distance: float

    @property
    def label(self) -> str:
        """Method and memory, in two lines."""
        label = self.method.label
        return label if self.method.is_dense else f"{label}\n{100 * self.share:.3g}% memory"


def memory_share(generator: Generator, method: Method) -> float:
    """Key visits per query of a method, relative to dense attention, averaged over a generator's attention blocks.

    Example:
        >>> from smyrf.experiments.biggan.config import Config
        >>> from smyrf.methods import Smyrf
        >>> small = Generator(Config(resolution=64, channels=1, n_latent=6, attention=(64,)))
        >>> memory_share(small, Smyrf(64, 32))
        0.5
    """
    if method.is_dense:
        return 1.0
    shares = [method.memory_share(size**2 // 4, size**2) for size in generator.config.attention]
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
) -> list[MethodImages]:
    """Generate images from the same latents and classes with each method; the generator is left unchanged.

    Args:
        classes: used in turn; random by default.
        truncation: bound of the latents.
        seed: seed of latents, classes and hashes.
        track: wraps the methods, to show progress.

    Raises:
        ValueError: there is no attention block, or no such class.
    """
    z, numbers = draw_inputs(generator, n_images, classes=classes, truncation=truncation, seed=seed)
    shares = {method: memory_share(generator, method) for method in methods}
    rows: list[MethodImages] = []
    with restored_methods(generator):
        set_method(generator, Dense())
        dense = generate(generator, z, numbers, batch)
        remaining: Iterable[Method] = track(methods)
        for method in remaining:
            set_method(generator, method, seed)
            images = dense if method.is_dense else generate(generator, z, numbers, batch)
            length = torch.linalg.vector_norm(dense).clamp_min(torch.finfo(dense.dtype).tiny)  # images may be zero
            distance = torch.linalg.vector_norm(images - dense) / length
            rows.append(MethodImages(method, images, shares[method], float(distance)))
    return rows


def write_images(rows: Sequence[MethodImages], path: Path, title: str) -> list[Path]:
    """Write a grid for one method, or the paper's figure for several, and return the paths."""
    if len(rows) > 1:
        return save_comparison([(row.label, row.images) for row in rows], path, title)
    file = path.with_name(path.name + ".png")
    save_image(tile(rows[0].images), file)
    return [file]
