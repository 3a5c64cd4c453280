"""Score a generator with different attention methods: the paper's table of a pretrained BigGAN.

Results in this file are quoted from the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smyrf.experiments.biggan.features import FeatureNetwork, look
from smyrf.experiments.biggan.latents import draw_inputs, generate
from smyrf.experiments.biggan.networks import Generator, restored_methods, set_method
from smyrf.experiments.biggan.pictures import Pictures
from smyrf.experiments.biggan.sample import memory_share
from smyrf.experiments.biggan.statistics import Moments, frechet_distance, inception_score, moments
from smyrf.methods import Dense, Method, Smyrf

# Minimum number of images per split of an inception score: that of a single image is always 1.
N_LEAST = 10
# The paper's table: inception score, its standard deviation, FID; attention at 64×64 pixels.
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
    """Scores of a generator with one attention method.

    Args:
        share: key visits per query, relative to dense attention.
        frechet: Fréchet distance to real images; None without any.
        to_dense: Fréchet distance to images of dense attention; None if dense attention was not scored.
        inception: inception score and its standard deviation; None without class probabilities or with few images.
        paper: the paper's results for this method, if the generator has attention at the same resolution.
    """

    method: Method
    share: float
    n_images: int
    frechet: float | None
    to_dense: float | None
    inception: tuple[float, float] | None
    paper: tuple[float, float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The scores as JSON."""
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
    """Compute the moments of the features of real images."""

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
    """Score each method on the same latents and classes; the generator is left unchanged.

    Args:
        real: moments of real images.
        seed: seed of latents, classes and hashes; each batch has its own hashes.
        track: wraps batches, to show progress with a title.

    Raises:
        ValueError: there is no attention block, or the feature network fails; raised before the first score.
    """
    methods = sorted(methods, key=lambda method: not method.is_dense)  # the others are compared with it
    shares = [memory_share(generator, method) for method in methods]
    z, classes = draw_inputs(generator, n_images, truncation=truncation, seed=seed)
    network.check(generator.config.n_colours, generator.config.resolution)

    is_papers = generator.config.attention == (64,) and generator.config.n_classes > 1
    n_parts = min(10, n_images // N_LEAST)

    def images(method: Method) -> Iterator[Tensor]:
        for number, start in enumerate(track(range(0, n_images, batch), str(method))):
            # New hashes for each batch, so that a score does not depend on a single draw.
            set_method(generator, method, seed + number)
            part = slice(start, start + batch)
            yield generate(generator, z[part], None if classes is None else classes[part], batch)

    def scores() -> Iterator[Score]:
        dense: Moments | None = None
        with restored_methods(generator):
            for method, share in zip(methods, shares, strict=True):
                features, probabilities = look(network, images(method))
                own = moments(features)
                dense = own if method.is_dense else dense
                yield Score(
                    method,
                    share,
                    n_images,
                    None if real is None else frechet_distance(own, real),
                    None if dense is None else frechet_distance(own, dense),
                    None if probabilities is None or not n_parts else inception_score(probabilities, n_parts),
                    PAPER.get(method) if is_papers else None,
                )

    return scores()
