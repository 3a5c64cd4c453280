"""Capture the attention calls of a generator.

Shapes: B images, R × R pixels; N queries and M = N / 4 pooled keys of an attention block.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smyrf.call import Call
from smyrf.experiments.biggan.blocks import AttentionBlock
from smyrf.experiments.biggan.latents import generate
from smyrf.experiments.biggan.networks import Generator, restored_methods, set_method
from smyrf.methods import Dense


@torch.no_grad()
def generator_calls(generator: Generator, z: Tensor, classes: Tensor | None) -> tuple[Tensor, list[Call]]:
    """Generate images with dense attention, and capture one call per attention block: one head, unscaled scores.

    Args:
        generator: runs in evaluation mode, and is left unchanged.
        z, classes: inputs of the generator.

    Returns:
        images ``(B, colours, R, R)``, and calls in the order of the blocks, each for all images.

    Raises:
        ValueError: the generator has no attention block.

    Example:
        >>> from smyrf.experiments.biggan.config import Config
        >>> generator = Generator(Config(resolution=32, channels=8, n_classes=1, n_latent=8, attention=(16,)))
        >>> images, (call,) = generator_calls(generator, torch.randn(2, 8), None)
        >>> images.shape, call.q.shape, call.k.shape, call.name
        (torch.Size([2, 3, 32, 32]), torch.Size([2, 1, 256, 4]), torch.Size([2, 1, 64, 4]), 'blocks.1.1')
    """
    blocks = {name: one for name, one in generator.named_modules() if isinstance(one, AttentionBlock)}
    if not blocks:
        raise ValueError("the generator has no attention block")
    seen: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in blocks}

    def take(name: str, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(block, AttentionBlock)
        seen[name].append(tuple(x.cpu() for x in block.project(inputs[0])))

    handles = [block.register_forward_pre_hook(partial(take, name)) for name, block in blocks.items()]
    try:
        with restored_methods(generator):
            set_method(generator, Dense())
            images = generate(generator, z, classes)
    finally:
        for handle in handles:
            handle.remove()
    calls = []
    for name, batches in seen.items():
        q, k, v = (torch.cat(some) for some in zip(*batches, strict=True))  # (B, 1, N, D), (B, 1, M, D), (B, 1, M, E)
        calls.append(Call(q, k, v, 1.0, name=name))
    return images, calls
