"""BigGAN's generator and discriminator. State dicts have the keys of the public PyTorch checkpoints.

Shapes: B images, latent width Z, R × R pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smyrf.experiments.biggan import spectral
from smyrf.experiments.biggan.blocks import AttentionBlock, BatchNorm, DiscriminatorBlock, GeneratorBlock
from smyrf.experiments.biggan.config import BOTTOM, N_KEEPING, Config
from smyrf.methods import Method, check_method


class Generator(nn.Module):
    """Generate images from latents and classes.

    Args:
        config: architecture of both networks.

    Example:
        >>> config = Config(resolution=32, channels=4, n_classes=10, n_latent=16, n_shared=8, attention=(16,))
        >>> generator = Generator(config).eval()
        >>> generator(torch.randn(2, 16), torch.tensor([3, 7])).shape
        torch.Size([2, 3, 32, 32])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        widths = config.generator_widths
        if config.n_classes > 1 and config.n_shared:
            self.shared = nn.Embedding(config.n_classes, config.n_shared)
            nn.init.orthogonal_(self.shared.weight)
        self.linear = spectral.Linear(config.n_chunk or config.n_latent, widths[0] * BOTTOM**2)
        blocks = []
        for number, (n_in, n_out) in enumerate(pairwise(widths)):
            is_bare = not config.hierarchical and not config.n_shared  # the condition is a one-hot class
            block: list[nn.Module] = [GeneratorBlock(n_in, n_out, config.n_condition, not is_bare)]
            if BOTTOM * 2 ** (number + 1) in config.attention:
                block.append(AttentionBlock(n_out, config.method))
            blocks.append(nn.ModuleList(block))
        self.blocks = nn.ModuleList(blocks)
        self.output_layer = nn.Sequential(
            BatchNorm(widths[-1]), nn.ReLU(), spectral.Conv2d(widths[-1], config.n_colours, 3)
        )

    def forward(self, z: Tensor, classes: Tensor | None = None) -> Tensor:
        """Generate images ``(B, colours, R, R)`` between −1 and 1.

        Args:
            z: latents ``(B, Z)``.
            classes: class indices ``(B,)``; None for a generator of one class.
        """
        first, conditions = self._conditions(z, classes)
        h = self.linear(first).reshape(len(z), -1, BOTTOM, BOTTOM)  # (B, C, 4, 4)
        for block, condition in zip(self.blocks, conditions, strict=True):
            assert isinstance(block, nn.ModuleList)
            h = block[0](h, condition)
            for layer in block[1:]:
                h = layer(h)
        return torch.tanh(self.output_layer(h))

    def _conditions(self, z: Tensor, classes: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The part of z that is the input of the first layer, and the condition of each block."""
        config = self.config
        if z.dim() != 2 or z.shape[1] != config.n_latent:
            raise ValueError(f"z has the shape {tuple(z.shape)}, it must be (images, {config.n_latent})")
        of_class = self._embed(classes, len(z), z.dtype)
        if not config.hierarchical:
            return z, [of_class] * config.n_blocks
        first, *parts = torch.split(z[:, : config.n_chunk * (config.n_blocks + 1)], config.n_chunk, 1)
        return first, [part if of_class is None else torch.cat([of_class, part], 1) for part in parts]

    def _embed(self, classes: Tensor | None, n_images: int, dtype: torch.dtype) -> Tensor | None:
        config = self.config
        if config.n_classes == 1:
            return None
        check_classes(classes, n_images, config.n_classes)
        assert classes is not None
        return self.shared(classes) if config.n_shared else F.one_hot(classes, config.n_classes).to(dtype)


class Discriminator(nn.Module):
    """Projection discriminator: score how real an image looks, given its class.

    Example:
        >>> config = Config(resolution=32, channels=4, n_classes=10, n_latent=16, n_shared=8, attention=(16,))
        >>> Discriminator(config)(torch.randn(2, 3, 32, 32), torch.tensor([3, 7])).shape
        torch.Size([2, 1])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        widths = config.discriminator_widths
        n_halving = len(widths) - 1 - N_KEEPING[config.resolution]
        blocks = []
        for number, (n_in, n_out) in enumerate(pairwise(widths)):
            halves = number < n_halving
            size = config.resolution >> min(number + 1, n_halving)
            block: list[nn.Module] = [DiscriminatorBlock(n_in, n_out, is_first=number == 0, halves=halves)]
            if halves and size in config.attention:
                block.append(AttentionBlock(n_out, config.method))
            blocks.append(nn.ModuleList(block))
        self.blocks = nn.ModuleList(blocks)
        self.linear = spectral.Linear(widths[-1], 1)
        if config.n_classes > 1:
            self.embed = spectral.Embedding(config.n_classes, widths[-1])

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Compute scores ``(B, 1)``, higher for images that look real.

        Args:
            images: ``(B, colours, R, R)``.
            classes: class indices ``(B,)``; None for a discriminator of one class.
        """
        config = self.config
        expected = (config.n_colours, config.resolution, config.resolution)
        if images.dim() != 4 or tuple(images.shape[1:]) != expected:
            raise ValueError(f"images have the shape {tuple(images.shape)}, it must be (images, {expected})")
        h = images
        for block in self.blocks:
            assert isinstance(block, nn.ModuleList)
            for layer in block:
                h = layer(h)
        h = F.relu(h).sum((2, 3))  # (B, C)
        score = self.linear(h)
        if config.n_classes == 1:
            return score
        check_classes(classes, len(images), config.n_classes)
        return score + (self.embed(classes) * h).sum(1, keepdim=True)


def check_classes(classes: Tensor | None, n_images: int, n_classes: int) -> None:
    """Raise unless there is a valid class for each image."""
    if classes is None:
        raise ValueError(f"classes are missing: the network has {n_classes}")
    if classes.shape != (n_images,) or classes.dtype != torch.int64:
        raise ValueError(f"classes have shape {tuple(classes.shape)} and {classes.dtype}, not ({n_images},) and int64")
    if n_images and not (int(classes.min()) >= 0 and int(classes.max()) < n_classes):
        raise ValueError(f"classes must be from 0 to {n_classes - 1}, not {int(classes.min())} to {int(classes.max())}")


def attention_blocks(network: nn.Module) -> Iterator[AttentionBlock]:
    """The attention blocks of a network, from input to output."""
    return (module for module in network.modules() if isinstance(module, AttentionBlock))


def set_method(network: nn.Module, method: Method, seed: int | None = None) -> None:
    """Set the method of all attention blocks of a network.

    Args:
        seed: seed of hashes; None for PyTorch's global generator.

    Raises:
        ValueError: there is no attention block, and the method is not dense attention.
    """
    check_method(method)
    blocks = list(attention_blocks(network))
    if not blocks and not method.is_dense:
        raise ValueError(f"{type(network).__name__} has no attention block")
    for block in blocks:
        block.attend.method, block.attend.seed = method, seed


@contextmanager
def restored_methods(network: nn.Module) -> Iterator[None]:
    """Restore the methods and seeds of attention blocks on exit."""
    before = [(block.attend, block.attend.method, block.attend.seed) for block in attention_blocks(network)]
    try:
        yield
    finally:
        for layer, method, seed in before:
            layer.method, layer.seed = method, seed
