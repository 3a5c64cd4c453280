"""Standing statistics (Brock et al., 2019): batch norm statistics of a generator over many latents."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from smyrf.experiments.biggan.blocks import MOMENTUM, BatchNorm
from smyrf.experiments.biggan.networks import Generator


@torch.no_grad()
def collect_statistics(generator: Generator, batches: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Replace the batch norm statistics of a generator by their mean over batches.

    Averaged weights need their own: the statistics of the trained generator belong to other weights, and to its last
    few batches.

    Args:
        batches: latents ``(B, Z)`` and classes ``(B,)``, or None for a generator of one class.
    """
    norms = [module for module in generator.modules() if isinstance(module, BatchNorm)]
    modes = {module: module.training for module in generator.modules()}
    generator.eval()  # keeps the vectors of spectral norm
    try:
        for number, (z, classes) in enumerate(batches):
            for norm in norms:
                norm.training = True  # not .train(): its submodules have spectral norm
                norm.momentum = 1.0 / (number + 1)  # gives every batch the same weight
            generator(z, classes)
    finally:
        for module, mode in modes.items():
            module.training = mode
        for norm in norms:
            norm.momentum = MOMENTUM
