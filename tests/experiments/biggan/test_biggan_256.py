"""BigGAN at 256×256 pixels, beyond the public checkpoint: its blocks, and the presets of the paper."""

from dataclasses import replace

import pytest
import torch

from smyrf.experiments.biggan.config import Config
from smyrf.experiments.biggan.networks import Discriminator, Generator, attention_blocks
from smyrf.experiments.biggan.recipe import PRESETS


def blocks(network, *inputs):
    """Channels before and behind each residual block, and pixels behind it."""
    found = []
    for block in network.blocks:
        block[0].register_forward_hook(
            lambda layer, given, out: found.append((layer.conv1.weight.shape[1], out.shape[1], *out.shape[2:]))
        )
    network(*inputs)
    return found


def test_blocks_have_the_widths_and_sizes_of_the_original():
    config = Config(resolution=256, channels=1, n_classes=1, n_latent=140, attention=())
    generator, discriminator = Generator(config), Discriminator(config)
    with torch.no_grad():
        made = blocks(generator, torch.randn(1, 140))
        judged = blocks(discriminator, torch.randn(1, 3, 256, 256))
    inputs, outputs, sizes = (16, 16, 8, 8, 4, 2), (16, 8, 8, 4, 2, 1), (8, 16, 32, 64, 128, 256)
    assert made == [*zip(inputs, outputs, sizes, sizes, strict=True)]
    assert generator.linear.weight.shape == (16 * 4 * 4, 20)  # z in 7 parts: for the first image, and for each block
    inputs, outputs, sizes = (3, 1, 2, 4, 8, 8, 16), (1, 2, 4, 8, 8, 16, 16), (128, 64, 32, 16, 8, 4, 4)
    assert judged == [*zip(inputs, outputs, sizes, sizes, strict=True)]  # the last block keeps the size
    assert [block[0].conv_sc is not None for block in discriminator.blocks] == [True] * 6 + [False]
    assert discriminator.linear.weight.shape == (1, 16)
    assert Config(resolution=256).generator_widths == (1536, 1536, 768, 768, 384, 192, 96)


@pytest.mark.parametrize("name", ["celeba-256/smyrf-4x8192", "celeba-256/tangent-1.6"])
def test_presets_make_images_with_attention_of_all_their_pixels(name):
    config = replace(PRESETS[name].config, channels=2)
    generator, discriminator = Generator(config), Discriminator(config)
    assert [len(block) for block in generator.blocks] == [1, 1, 1, 1, 1, 2]  # attention as the last layer before tanh
    (block,) = attention_blocks(generator)
    calls = []
    block.attend.register_forward_hook(lambda layer, given, out: calls.append([x.shape[2] for x in given]))
    torch.nn.init.constant_(block.gamma, 1.0)
    with torch.no_grad():
        images = generator(torch.randn(1, 120))
        scores = discriminator(images)
    assert images.shape == (1, 3, 256, 256) and scores.shape == (1, 1)
    assert images.isfinite().all() and images.std() > 0.01
    assert calls == [[65536, 16384, 16384]]  # queries, and keys and values that are pooled
