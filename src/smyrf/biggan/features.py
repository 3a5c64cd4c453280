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
        ValueError: it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        try:
            loaded: Any = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
        except (RuntimeError, ValueError, OSError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{path} cannot be loaded as TorchScript: {first}") from error
        self.path, self._network = path, loaded.eval()
        if not hasattr(loaded, "forward"):
            raise ValueError(f"{path} is TorchScript without a function forward")
        names = [argument.name for argument in self._network.forward.schema.arguments]
        self._is_inception = "return_features" in names
        # Published inception scores leave the last layer's bias out.
        self._options = {"no_output_bias": True} if "no_output_bias" in names else {}

    def check(self, n_colours: int, resolution: int) -> None:
        """Looks at two empty images, before there is anything to lose.

        Raises:
            ValueError: says what is wrong with the network.
        """
        try:
            self(torch.zeros(2, n_colours, resolution, resolution))
        except ValueError:
            raise
        except Exception as error:  # whatever a network of somebody's does
            first = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            size = f"{n_colours} colours and {resolution} pixels"
            raise ValueError(f"{self.path} cannot look at images of {size}: {first}") from error

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Seen:
        """Features of images ``(n, colours, R, R)`` between −1 and 1."""
        if self._is_inception:
            pixels = ((images + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
            pixels = pixels.expand(-1, 3, -1, -1)  # grey ones too
            features = self._network(pixels, return_features=True)
            return Seen(*self._checked((features, self._network(pixels, **self._options)), len(images), softmax=False))
        found = self._network(images)
        return Seen(*self._checked((found,) if isinstance(found, Tensor) else found, len(images), softmax=True))

    def _checked(self, found: Any, n_images: int, *, softmax: bool) -> tuple[Tensor, Tensor | None]:
        """Features and probabilities, if they are what they should be."""
        is_right = isinstance(found, tuple | list) and 1 <= len(found) <= 2
        if not is_right or not all(isinstance(x, Tensor) and x.dim() == 2 and len(x) == n_images for x in found):
            raise ValueError(f"{self.path} must give features (images, width), or features and logits")
        if len(found) == 1:
            return found[0], None
        return found[0], found[1].softmax(1) if softmax else found[1]


def look(network: FeatureNetwork, batches: Iterator[Tensor]) -> Seen:
    """Features of all images of some batches, together."""
    seen = [network(batch) for batch in batches]
    probabilities = [one.probabilities for one in seen if one.probabilities is not None]
    return Seen(torch.cat([one.features for one in seen]), torch.cat(probabilities) if probabilities else None)
