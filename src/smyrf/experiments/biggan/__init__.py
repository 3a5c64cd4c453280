"""The paper's image experiments: BigGAN with any attention method.

Example:
    >>> from smyrf.experiments.biggan import Config
    >>> Config(resolution=128).generator_widths
    (1536, 1536, 768, 384, 192, 96)
"""

from smyrf.experiments.biggan.checkpoints import load_discriminator, load_generator, save_network
from smyrf.experiments.biggan.config import Config
from smyrf.experiments.biggan.latents import draw_classes, draw_latents, generate
from smyrf.experiments.biggan.networks import Discriminator, Generator, set_method

__all__ = [
    "Config",
    "Discriminator",
    "Generator",
    "draw_classes",
    "draw_latents",
    "generate",
    "load_discriminator",
    "load_generator",
    "save_network",
    "set_method",
]
