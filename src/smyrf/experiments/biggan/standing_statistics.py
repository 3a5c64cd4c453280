"""Standing statistics (Brock et al., 2019): normalisation by what a generator's own weights make of many latents."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from smyrf.experiments.biggan.blocks import MOMENTUM, BatchNorm
from smyrf.experiments.biggan.networks import Generator


@torch.no_grad()
def collect_statistics(generator: Generator, batches: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Replaces the stored statistics of a generator by means over batches; nothing else of it changes.

    An average of weights has to have its own: those of the generator in training belong to other weights, and to the
    last few batches.

    Args:
        batches: latents ``(B, Z)`` and classes ``(B,)``, or None for a generator of one class.
    """
    norms = [module for module in generator.modules() if isinstance(module, BatchNorm)]
    modes = {module: module.training for module in generator.modules()}
    generator.eval()  # the vectors of spectral norm stay
    try:
        for number, (z, classes) in enumerate(batches):
            for norm in norms:
                norm.training = True  # not .train(): its own maps have spectral norm
                norm.momentum = 1.0 / (number + 1)  # a mean in which every batch counts the same
            generator(z, classes)
    finally:
        for module, mode in modes.items():
            module.training = mode
        for norm in norms:
            norm.momentum = MOMENTUM
