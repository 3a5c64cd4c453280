"""Networks that look at images for scores: TorchScript files, given by path.

A network takes images and gives features ``(n, F)``, or features and logits ``(n, K)``. The Inception file that is used
for published scores takes bytes from 0 to 255 and tells features by an argument, ``return_features=True``; both
kinds are understood. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class FeatureError(ValueError):
    """What is wrong with a network that looks at images, with its file."""


class Seen(NamedTuple):
    """What a network has seen in images.

    Args:
        features: ``(n, F)``.
        probabilities: of classes, ``(n, K)``; None if the network does not tell.
    """

    features: Tensor
    probabilities: Tensor | None


class FeatureNetwork:
    """A TorchScript network from a file.

    Args:
        path: of the file.

    Raises:
        FeatureError: it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        try:
            loaded: Any = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
        except (RuntimeError, ValueError, OSError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise FeatureError(f"{path} cannot be loaded as TorchScript: {first}") from error
        self.path, self._network = path, loaded.eval()
        if not hasattr(loaded, "forward"):
            raise FeatureError(f"{path} is TorchScript without a function forward")
        names = [argument.name for argument in self._network.forward.schema.arguments]
        self._is_inception = "return_features" in names
        # Published inception scores leave the last layer's bias out.
        self._options = {"no_output_bias": True} if "no_output_bias" in names else {}

    def check(self, n_colours: int, resolution: int) -> None:
        """Looks at two empty images, before there is anything to lose.

        Raises:
            FeatureError: says what is wrong with the network.
        """
        self(torch.zeros(2, n_colours, resolution, resolution))

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Seen:
        """Features of images ``(n, colours, R, R)`` between −1 and 1.

        Raises:
            FeatureError: says what is wrong with the network.
        """
        try:
            found = self._see(images)
        except Exception as error:  # whatever a network of somebody's does
            first = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            size = f"{images.shape[1]} colours and {images.shape[2]} pixels"
            raise FeatureError(f"{self.path} cannot look at {len(images)} images of {size}: {first}") from error
        is_right = isinstance(found, tuple | list) and 1 <= len(found) <= 2
        if not is_right or not all(isinstance(x, Tensor) and x.dim() == 2 and len(x) == len(images) for x in found):
            raise FeatureError(f"{self.path} must give features (images, width), or features and logits")
        if not all(torch.isfinite(x).all() for x in found):
            raise FeatureError(f"{self.path} sees features that are not finite")
        if len(found) == 1:
            return Seen(found[0], None)
        return Seen(found[0], found[1] if self._is_inception else found[1].softmax(1))

    def _see(self, images: Tensor) -> Any:
        """What the network gives: features and, perhaps, logits; those of Inception are probabilities already."""
        if not self._is_inception:
            found = self._network(images)
            return (found,) if isinstance(found, Tensor) else found
        pixels = ((images + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
        pixels = pixels.expand(-1, 3, -1, -1)  # grey ones too
        return self._network(pixels, return_features=True), self._network(pixels, **self._options)


def look(network: FeatureNetwork, batches: Iterator[Tensor]) -> Seen:
    """Features of all images of some batches, together."""
    seen = [network(batch) for batch in batches]
    probabilities = [one.probabilities for one in seen if one.probabilities is not None]
    return Seen(torch.cat([one.features for one in seen]), torch.cat(probabilities) if probabilities else None)
