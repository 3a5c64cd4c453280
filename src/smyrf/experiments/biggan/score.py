"""Scores of a generator with different attention: the paper's table of a pretrained BigGAN.

Figures of the paper are quoted; nothing here was measured by us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smyrf.experiments.biggan.features import FeatureNetwork, look
from smyrf.experiments.biggan.latents import draw_classes, draw_latents, generate
from smyrf.experiments.biggan.networks import Generator, restored_methods, set_method
from smyrf.experiments.biggan.pictures import Pictures
from smyrf.experiments.biggan.sample import memory_share
from smyrf.experiments.biggan.statistics import Moments, frechet_distance, inception_score, moments
from smyrf.methods import Dense, Method, Smyrf

# Images in a part of which an inception score is taken: that of a single one is 1, whatever it shows.
N_LEAST = 10
# Of its table: inception score, its deviation, FID; attention at 64×64 pixels.
PAPER: dict[Method, tuple[float, float, float]] = {
    Dense(): (93.79, 1.96, 11.30),
    Smyrf(32, 64): (91.91, 2.65, 12.18),
    Smyrf(64, 32): (92.09, 1.83, 12.18),
    Smyrf(128, 16): (91.59, 1.83, 12.10),
    Smyrf(32, 32): (87.90, 1.90, 13.34),
    Smyrf(64, 16): (88.45, 1.70, 13.45),
    Smyrf(128, 8): (89.61, 1.63, 13.19),
    Smyrf(32, 16): (81.67, 1.97, 16.08),
    Smyrf(64, 8): (82.87, 1.82, 16.00),
    Smyrf(128, 4): (82.10, 2.06, 16.03),
}


@dataclass(frozen=True)
class Score:
    """What a feature network makes of a generator's images with one attention.

    Args:
        share: key visits of a query, relative to dense attention.
        frechet: distance to real images, or None without any.
        to_dense: Fréchet distance to the same generator's images with dense attention; None where it was not scored.
        inception: score and its deviation, or None if the network tells no classes or images are few.
        paper: its figures for this method, if this generator has attention where the paper's has.
    """

    method: Method
    share: float
    n_images: int
    frechet: float | None
    to_dense: float | None
    inception: tuple[float, float] | None
    paper: tuple[float, float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        plain = {"memory": self.share, "images": self.n_images, "frechet_distance": self.frechet}
        paper = self.paper
        return {
            "method": self.method.to_dict(),
            **plain,
            "frechet_distance_to_dense": self.to_dense,
            "inception_score": None if self.inception is None else list(self.inception),
            "paper": None if paper is None else {"inception_score": list(paper[:2]), "fid": paper[2]},
        }


def real_moments(network: FeatureNetwork, pictures: Pictures, batch: int = 32, track: Any = iter) -> Moments:
    """Moments of the features of real images."""

    def batches() -> Iterator[Tensor]:
        for start in track(range(0, len(pictures), batch)):
            yield torch.stack([pictures[index][0] for index in range(start, min(start + batch, len(pictures)))])

    return moments(look(network, batches()).features)


def score(
    generator: Generator,
    methods: Sequence[Method],
    network: FeatureNetwork,
    n_images: int,
    *,
    real: Moments | None = None,
    truncation: float | None = None,
    seed: int = 0,
    batch: int = 8,
    track: Callable[[Any, str], Any] = lambda some, title: some,
) -> Iterator[Score]:
    """A score for each method, on the same latents and classes; the generator is left with the attention it had.

    Args:
        real: moments of real images.
        seed: of latents, classes and hashes, of which each batch has its own.
        track: wraps batches, to show progress, with a title.

    Raises:
        ValueError: there is no attention block, too few images, or a network that cannot look at them; at once, before
            the first score is asked for.
    """
    methods = sorted(methods, key=lambda method: not isinstance(method, Dense))  # others are compared with it
    shares = [memory_share(generator, method) for method in methods]
    z = draw_latents(n_images, generator.config.n_latent, truncation=truncation, seed=seed)
    classes = draw_classes(n_images, generator, None, seed)
    network.check(generator.config.n_colours, generator.config.resolution)
    return _scores(generator, methods, shares, network, z, classes, real, seed, batch, track)


def _scores(
    generator: Generator,
    methods: Sequence[Method],
    shares: Sequence[float],
    network: FeatureNetwork,
    z: Tensor,
    classes: Tensor | None,
    real: Moments | None,
    seed: int,
    batch: int,
    track: Callable[[Any, str], Any],
) -> Iterator[Score]:
    dense: Moments | None = None
    n_images, is_papers = len(z), generator.config.attention == (64,) and generator.config.n_classes > 1
    with restored_methods(generator):
        for method, share in zip(methods, shares, strict=True):

            def batches(method: Method = method) -> Iterator[Tensor]:
                for number, start in enumerate(track(range(0, n_images, batch), str(method))):
                    # New hashes for each batch: a score of many images is not to hang on one draw of a few vectors.
                    set_method(generator, method, seed + number)
                    part = slice(start, start + batch)
                    yield generate(generator, z[part], None if classes is None else classes[part], batch)

            seen = look(network, batches())
            own = moments(seen.features)
            dense = own if isinstance(method, Dense) else dense
            n_parts = min(10, n_images // N_LEAST)
            yield Score(
                method,
                share,
                n_images,
                None if real is None else frechet_distance(own, real),
                None if dense is None else frechet_distance(own, dense),
                inception_score(seen.probabilities, n_parts) if seen.probabilities is not None and n_parts else None,
                PAPER.get(method) if is_papers else None,
            )
