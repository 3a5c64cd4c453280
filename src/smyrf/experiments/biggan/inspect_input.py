"""The attention calls of a generator as the input of `smyrf inspect`."""

from __future__ import annotations

from smyrf.experiments.biggan.calls import generator_calls
from smyrf.experiments.biggan.latents import draw_inputs
from smyrf.experiments.biggan.networks import Generator
from smyrf.tools.compare.inputs import Inputs
from smyrf.tools.inspect.command import Loaded


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
