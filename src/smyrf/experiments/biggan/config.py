"""`Config`: the architecture of a BigGAN."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from smyrf.experiments.validation import check_ints, known_fields
from smyrf.methods import Dense, Method, check_method, method_from_dict

# Channel multipliers of the blocks by resolution. Generator: input of the first block, then output of each; each block
# doubles the resolution, starting at 4×4. Discriminator: output of each block; the last ones keep the resolution.
GENERATOR = {
    32: (4, 4, 4, 4),
    64: (16, 16, 8, 4, 2),
    128: (16, 16, 8, 4, 2, 1),
    256: (16, 16, 8, 8, 4, 2, 1),
}
DISCRIMINATOR = {
    32: (4, 4, 4, 4),
    64: (1, 2, 4, 8, 16),
    128: (1, 2, 4, 8, 16, 16),
    256: (1, 2, 4, 8, 8, 16, 16),
}
# Number of last blocks of the discriminator that keep the resolution.
N_KEEPING = {32: 2, 64: 1, 128: 1, 256: 1}
BOTTOM = 4


@dataclass(frozen=True, kw_only=True)
class Config:
    """Architecture of a generator and its discriminator.

    Args:
        resolution: resolution of images: 32, 64, 128 or 256 pixels.
        channels: width of the narrowest blocks; others are multiples.
        n_classes: number of classes; 1 for unconditional images.
        n_latent: width of a latent vector z.
        hierarchical: whether each block gets its own chunk of z, after the first chunk, which is the input.
        n_shared: width of the class embedding that all blocks share; 0 for an embedding in each block.
        attention: resolutions of the blocks that are followed by an attention block.
        method: method of the attention blocks.
        n_colours: 3, or 1 for greyscale images.

    Example:
        >>> config = Config(resolution=128)
        >>> config.n_chunk, config.generator_widths
        (20, (1536, 1536, 768, 384, 192, 96))
    """

    resolution: int = 128
    channels: int = 96
    n_classes: int = 1000
    n_latent: int = 120
    hierarchical: bool = True
    n_shared: int = 128
    attention: tuple[int, ...] = (64,)
    method: Method = field(default_factory=Dense)
    n_colours: int = 3

    def __post_init__(self) -> None:
        if self.resolution not in GENERATOR:
            raise ValueError(f"resolution={self.resolution} must be one of {', '.join(map(str, GENERATOR))}")
        check_ints(self, {"channels": 1, "n_classes": 1, "n_latent": 1, "n_shared": 0, "n_colours": 1})
        if self.n_colours not in (1, 3):
            raise ValueError(f"n_colours={self.n_colours} must be 1 or 3")
        if not isinstance(self.hierarchical, bool):
            raise TypeError(f"hierarchical={self.hierarchical!r} must be a bool")
        if not isinstance(self.attention, tuple | list):
            raise TypeError(f"attention={self.attention!r} must be a tuple of resolutions")
        object.__setattr__(self, "attention", tuple(dict.fromkeys(self.attention)))
        possible = [BOTTOM * 2**n for n in range(1, 8) if BOTTOM * 2**n <= self.resolution]
        for size in self.attention:
            if size not in possible:
                raise ValueError(f"attention at {size} must be one of {', '.join(map(str, possible))}")
        check_method(self.method)
        if self.hierarchical and self.n_latent < self.n_blocks + 1:
            raise ValueError(f"n_latent={self.n_latent} must be at least {self.n_blocks + 1}, a chunk for each block")

    @property
    def n_blocks(self) -> int:
        """Number of blocks of the generator."""
        return len(GENERATOR[self.resolution]) - 1

    @property
    def n_chunk(self) -> int:
        """Width of the chunk of z per block, with hierarchical latents; a remainder is not used."""
        return self.n_latent // (self.n_blocks + 1) if self.hierarchical else 0

    @property
    def n_condition(self) -> int:
        """Width of the condition of batch norm; 0 for none."""
        of_class = 0 if self.n_classes == 1 else self.n_shared or self.n_classes
        return of_class + self.n_chunk

    @property
    def generator_widths(self) -> tuple[int, ...]:
        """Channels before the first block and after each."""
        return tuple(self.channels * one for one in GENERATOR[self.resolution])

    @property
    def discriminator_widths(self) -> tuple[int, ...]:
        """Channels of the image and after each block."""
        return (self.n_colours, *(self.channels * one for one in DISCRIMINATOR[self.resolution]))

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON; `from_dict` reads it."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**plain, "attention": list(self.attention), "method": self.method.to_dict()}

    @staticmethod
    def from_dict(data: object) -> Config:
        """Read a config from JSON.

        Raises:
            ValueError: a field is unknown or invalid.
        """
        options = known_fields(Config, data, "a config")
        if "method" in options:
            options["method"] = method_from_dict(options["method"])
        return Config(**options)
