"""Random inputs of a generator, and images from them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from smyrf.experiments.biggan.networks import Generator


def draw_latents(n_images: int, n_latent: int, *, truncation: float | None = None, seed: int = 0) -> Tensor:
    """Draw latents ``(n_images, n_latent)`` from a normal distribution, truncated to ±`truncation`.

    Truncation trades variety for quality. A value depends only on its position and the seed: the first images of a
    larger draw are those of a smaller one.

    Args:
        truncation: bound of the values; None for none.

    Example:
        >>> draw_latents(2, 3, truncation=0.5).abs().max() <= 0.5
        tensor(True)
        >>> bool((draw_latents(2, 3) == draw_latents(5, 3)[:2]).all())
        True
    """
    if truncation is not None and not (math.isfinite(truncation) and truncation > 0.0):
        raise ValueError(f"{truncation=} must be positive")
    source = torch.Generator().manual_seed(seed)
    # The inverse of the normal distribution function needs no rejection.
    uniform = torch.rand(n_images, n_latent, generator=source, dtype=torch.float64)
    bound = 1.0 if truncation is None else math.erf(truncation / math.sqrt(2.0))
    tiny = 2.0**-53
    return (math.sqrt(2.0) * torch.erfinv((bound * (2.0 * uniform - 1.0)).clamp(tiny - 1.0, 1.0 - tiny))).float()


def draw_classes(n_images: int, generator: Generator, classes: list[int] | None, seed: int) -> Tensor | None:
    """Choose classes ``(n_images,)``: the given ones in turn, or random ones; None for a generator of one class.

    Raises:
        ValueError: a class does not exist, or classes are given for an unconditional generator.
    """
    n_classes = generator.config.n_classes
    if n_classes == 1:
        if classes:
            raise ValueError(f"classes={classes} are given, but the generator has only one class")
        return None
    for one in classes or []:
        if not 0 <= one < n_classes:
            raise ValueError(f"class {one} must be from 0 to {n_classes - 1}")
    if classes:
        return torch.tensor(classes)[torch.arange(n_images) % len(classes)]
    return torch.randint(n_classes, (n_images,), generator=torch.Generator().manual_seed(seed + 1))


def draw_inputs(
    generator: Generator,
    n_images: int,
    *,
    classes: list[int] | None = None,
    truncation: float | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Draw latents and classes for a generator; arguments as for `draw_latents` and `draw_classes`."""
    z = draw_latents(n_images, generator.config.n_latent, truncation=truncation, seed=seed)
    return z, draw_classes(n_images, generator, classes, seed)


@torch.no_grad()
def generate(generator: Generator, z: Tensor, classes: Tensor | None, batch: int = 8) -> Tensor:
    """Generate images ``(B, colours, R, R)`` between −1 and 1 in batches, in evaluation mode; returned on the CPU.

    Raises:
        ValueError: the images are not finite.
    """
    training = generator.training
    generator.eval()
    device = next(generator.parameters()).device
    try:
        found = []
        for start in range(0, len(z), batch):
            part = slice(start, start + batch)
            some = None if classes is None else classes[part].to(device)
            found.append(generator(z[part].to(device), some).cpu())
            if not torch.isfinite(found[-1]).all():
                raise ValueError("the generator's weights give images that are not finite")
        return torch.cat(found)
    finally:
        generator.train(training)
