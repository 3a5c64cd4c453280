"""What a generator draws its images from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from smyrf.experiments.biggan.networks import Generator


def draw_latents(n_images: int, n_latent: int, *, truncation: float | None = None, seed: int = 0) -> Tensor:
    """Normal numbers ``(n_images, n_latent)``, each within ±`truncation`: less variety, better images.

    A number depends on its place and the seed alone: the first images of a longer list are those of a shorter one.

    Args:
        truncation: the bound; None for none.

    Example:
        >>> draw_latents(2, 3, truncation=0.5).abs().max() <= 0.5
        tensor(True)
        >>> bool((draw_latents(2, 3) == draw_latents(5, 3)[:2]).all())
        True
    """
    if truncation is not None and not (math.isfinite(truncation) and truncation > 0.0):
        raise ValueError(f"{truncation=} must be positive")
    chance = torch.Generator().manual_seed(seed)
    # Uniform numbers through the inverse of the normal distribution: no number is drawn twice.
    uniform = torch.rand(n_images, n_latent, generator=chance, dtype=torch.float64)
    bound = 1.0 if truncation is None else math.erf(truncation / math.sqrt(2.0))
    tiny = 2.0**-53
    return (math.sqrt(2.0) * torch.erfinv((bound * (2.0 * uniform - 1.0)).clamp(tiny - 1.0, 1.0 - tiny))).float()


def draw_classes(n_images: int, generator: Generator, classes: list[int] | None, seed: int) -> Tensor | None:
    """A class for each image, ``(n_images,)``: those given in turn, or any; None for a generator of one class.

    Raises:
        ValueError: a class that there is not, or classes for a generator that has none.
    """
    n_classes = generator.config.n_classes
    if n_classes == 1:
        if classes:
            raise ValueError(f"classes={classes} are given, and the generator has one class alone")
        return None
    for one in classes or []:
        if not 0 <= one < n_classes:
            raise ValueError(f"class {one} must be from 0 to {n_classes - 1}")
    if classes:
        return torch.tensor(classes)[torch.arange(n_images) % len(classes)]
    return torch.randint(n_classes, (n_images,), generator=torch.Generator().manual_seed(seed + 1))


@torch.no_grad()
def generate(generator: Generator, z: Tensor, classes: Tensor | None, batch: int = 8) -> Tensor:
    """Images of latents ``(B, colours, R, R)`` between −1 and 1, on the CPU, a batch at a time, in evaluation mode.

    Raises:
        ValueError: images are not finite.
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
