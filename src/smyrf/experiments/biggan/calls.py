"""Capture the attention calls of a generator.

Shapes: B images, R × R pixels; N queries and M = N / 4 pooled keys of an attention block.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smyrf.call import Call
from smyrf.experiments.biggan.blocks import AttentionBlock
from smyrf.experiments.biggan.latents import draw_inputs, generate
from smyrf.experiments.biggan.networks import Generator, restored_methods, set_method
from smyrf.methods import Dense

if TYPE_CHECKING:
    from smyrf.tools.inspect.command import Loaded


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


def draw_calls(
    generator: Generator,
    name: str,
    n_images: int,
    *,
    classes: list[int] | None = None,
    truncation: float | None = None,
    seed: int = 0,
) -> Loaded:
    """Capture the attention calls of a generator on random latents, as input of `smyrf inspect`.

    Args:
        name: file of the weights.
        classes: used in turn; random by default.
        truncation: bound of the latents.
        seed: seed of latents and classes.

    Raises:
        ValueError: the generator has no attention block, or no such class.
    """
    from smyrf.tools.compare.inputs import Inputs
    from smyrf.tools.inspect.command import Loaded

    z, numbers = draw_inputs(generator, n_images, classes=classes, truncation=truncation, seed=seed)
    _, calls = generator_calls(generator, z, numbers)
    batch = {"z": z} if numbers is None else {"z": z, "classes": numbers}
    sizes = " and ".join(f"{size}×{size}" for size in sorted(generator.config.attention))
    says = f"{n_images} generated image{'s' * (n_images > 1)}, attention at {sizes} pixels"
    about = {
        "generator": generator.config.to_dict(),
        "classes": None if numbers is None else numbers.tolist(),
        "truncation": truncation,
    }
    return Loaded(name, "images", Inputs((batch,), n_images, says), calls, about)
