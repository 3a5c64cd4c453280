"""`Recipe`: a complete, frozen description of a BigGAN training run, and the paper's runs as presets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from smyrf.experiments.biggan.config import Config
from smyrf.experiments.validation import check_between, check_ints, known_fields
from smyrf.methods import Dense, Method, Smyrf, Tangent
from smyrf.seeds import check_seed
from smyrf.tuning.search import check_target


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Training of a BigGAN with the hinge loss, Adam and a moving average of the generator's weights.

    Args:
        config: architecture of both networks.
        batch_size: images per step, over all processes and accumulated parts.
        accumulate: parts of a batch whose gradients are accumulated, to save memory; batch norm sees one part at a
            time.
        n_steps: steps of the generator.
        n_critic: discriminator steps per generator step.
        generator_rate, discriminator_rate: constant learning rates.
        beta1, beta2, epsilon: parameters of Adam.
        ema: decay of the moving average of the generator's weights, from which images are sampled.
        ema_start: first step of the average; before it the weights are copied.
        flip: mirror images at random.
        max_error: target error of attention, for which `smyrf.AdaptiveSchedule` adapts the budget; None for a fixed
            budget.
        adapt_every: steps between changes of the budget.
        seed: seed of weights, latents, the order of images and hashes.

    Example:
        >>> recipe = Recipe(config=Config(resolution=128), n_steps=10)
        >>> Recipe.from_dict(recipe.to_dict()) == recipe
        True
    """

    config: Config = field(default_factory=Config)
    batch_size: int = 32
    accumulate: int = 1
    n_steps: int = 120_000
    n_critic: int = 1
    generator_rate: float = 2e-4
    discriminator_rate: float = 5e-5
    beta1: float = 0.0
    beta2: float = 0.999
    epsilon: float = 1e-6
    ema: float = 0.9999
    ema_start: int = 1000
    flip: bool = False
    max_error: float | None = None
    adapt_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.config, Config):
            raise TypeError(f"config={self.config!r} must be a Config")
        counts = ("batch_size", "accumulate", "n_steps", "n_critic", "adapt_every")
        check_ints(self, {**dict.fromkeys(counts, 1), "ema_start": 0})
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch_size={self.batch_size} must be a multiple of accumulate={self.accumulate}")
        check_between(self, ("generator_rate", "discriminator_rate", "epsilon"), 1.0, zero=False)
        check_between(self, ("beta1", "beta2", "ema"), 1.0, zero=True)
        if self.max_error is not None:
            check_target(self.max_error)
            if not self.config.method.is_scalable:
                raise ValueError(f"max_error={self.max_error} needs a method with a size, not {self.label}")
        check_seed(self.seed, bits=32)

    @property
    def label(self) -> str:
        """Label of the attention method, for tables."""
        return self.config.method.label

    @property
    def name(self) -> str:
        """Name of the run's folder: its main settings, then a hash of all but the number of steps."""
        plain = {name: value for name, value in self.to_dict().items() if name != "n_steps"}
        words = self.label.lower().replace("×", "x").replace("%", "").replace(" ", "-")
        found = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]
        return f"biggan-{self.config.resolution}-{words}-seed{self.seed}-{found}"

    def to_dict(self) -> dict[str, Any]:
        """The recipe as JSON; `from_dict` reads it."""
        return {**{one.name: getattr(self, one.name) for one in fields(self)}, "config": self.config.to_dict()}

    @staticmethod
    def from_dict(data: object) -> Recipe:
        """Read a recipe from JSON.

        Raises:
            ValueError: a field is unknown or invalid.
        """
        options = known_fields(Recipe, data, "a recipe")
        return Recipe(**{**options, "config": Config.from_dict(options.get("config", {}))})


def _faces(resolution: int, attention: int, method: Method) -> Recipe:
    """Make a run of the paper on CelebA-HQ: one class, no hierarchical latents, no shared embedding, batch size 32."""
    config = Config(
        resolution=resolution, n_classes=1, hierarchical=False, n_shared=0, attention=(attention,), method=method
    )
    return Recipe(config=config)


# The paper's rows: attention moves from 64×64 to the last layer before tanh. Four rounds with clusters of 2,048 queries
# take half of the memory at 128×128; for 256×256 the paper says only "half", which is 4 × 8,192. Tangent is ours.
PRESETS: dict[str, Recipe] = {
    "celeba-128/dense-64": _faces(128, 64, Dense()),
    "celeba-128/smyrf-4x2048": _faces(128, 128, Smyrf(4, 2048)),
    "celeba-128/tangent-12.5": _faces(128, 128, Tangent(0.125)),
    "celeba-256/smyrf-4x8192": _faces(256, 256, Smyrf(4, 8192)),
    "celeba-256/tangent-1.6": _faces(256, 256, Tangent(0.016)),
}


def change(recipe: Recipe | None, n_classes: int, of_config: Mapping[str, Any], of_run: Mapping[str, Any]) -> Recipe:
    """Change settings of a recipe.

    Args:
        recipe: a preset; None for a BigGAN with the classes of the images, and attention at half of the resolution but
            at most at 64 pixels.
        of_config, of_run: settings of the networks and of the training; None keeps a setting.

    Raises:
        ValueError: the settings do not fit together.

    Example:
        >>> change(None, 10, {"resolution": 32}, {"n_steps": 5}).config.attention
        (16,)
    """
    given = {name: value for name, value in of_config.items() if value is not None}
    if recipe is None:
        several = n_classes > 1
        given.setdefault("attention", (min(64, given.get("resolution", 128) // 2),))
        config = Config(**{"n_classes": n_classes, "hierarchical": several, "n_shared": 128 * several, **given})
        recipe = Recipe(config=config)
    config = replace(recipe.config, **given)
    if config.n_classes == 1 and given.get("n_shared"):
        raise ValueError(f"n_shared={config.n_shared} is for classes, but the images have only one")
    return replace(recipe, config=config, **{name: value for name, value in of_run.items() if value is not None})
