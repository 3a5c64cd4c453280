"""Feature networks for scores, given by path: weights of Inception, or TorchScript.

Weights of the Inception network of published scores run no code from the file. TorchScript does, and can write files:
it is loaded only if that is allowed. Such a network maps images to features ``(n, F)``, or to features and logits
``(n, K)``; or it takes uint8 images and returns features if ``return_features=True``, as the TorchScript file of
Inception does. Nothing is downloaded.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smyrf.experiments.biggan.checkpoints import CheckpointError
from smyrf.experiments.biggan.inception import Inception, load_inception
from smyrf.tools.error_text import first_line


class FeatureError(ValueError):
    """A feature network that cannot be used; the message names its file."""


class ImageFeatures(NamedTuple):
    """Features of images.

    Args:
        features: ``(n, F)``.
        probabilities: class probabilities ``(n, K)``; None if the network has no logits.
    """

    features: Tensor
    probabilities: Tensor | None


def is_torchscript(path: Path) -> bool:
    """Whether a file is a TorchScript archive, by the names of its parts; nothing of it is loaded."""
    if not path.is_file():
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            parts = [name.split("/") for name in archive.namelist()]
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):  # zipfile: an unknown compression method
        return False
    return any(len(part) > 1 and part[1] in ("code", "constants.pkl") for part in parts)


class FeatureNetwork:
    """A feature network from a file.

    Args:
        path: weights of Inception, ``.pth`` or ``.safetensors``; or a TorchScript file.
        allow_torchscript: load TorchScript, which runs code from the file.

    Raises:
        FeatureError: the file cannot be loaded.
    """

    def __init__(self, path: Path, *, allow_torchscript: bool = False) -> None:
        self.path = path
        if is_torchscript(path) and not allow_torchscript:
            raise FeatureError(
                f"{path} is TorchScript, which runs code from the file: if you trust it, add --allow-torchscript "
                "(in Python allow_torchscript=True)"
            )
        try:
            self._network: Any = _load_torchscript(path) if is_torchscript(path) else load_inception(path)
        except CheckpointError as error:
            raise FeatureError(str(error)) from error
        names = _argument_names(self._network)
        self._returns_probabilities = "return_features" in names
        self._takes_bytes = self._returns_probabilities or isinstance(self._network, Inception)
        # Published inception scores omit the bias of the last layer.
        self._options = {"no_output_bias": True} if "no_output_bias" in names else {}

    def check(self, n_colours: int, resolution: int) -> None:
        """Run the network on two blank images.

        Raises:
            FeatureError: the network fails, or its output is invalid.
        """
        self(torch.zeros(2, n_colours, resolution, resolution))

    @torch.no_grad()
    def __call__(self, images: Tensor) -> ImageFeatures:
        """Compute features of images ``(n, colours, R, R)`` between −1 and 1.

        Raises:
            FeatureError: the network fails, or its output is invalid.
        """
        try:
            found = self._run(images)
        except Exception as error:  # a user's network may raise anything
            last = (str(error).strip().splitlines() or [type(error).__name__])[-1]  # of a TorchScript traceback
            size = f"{images.shape[1]} colours and {images.shape[2]} pixels"
            raise FeatureError(f"{self.path} fails on {len(images)} images of {size}: {last}") from error
        is_right = isinstance(found, tuple | list) and 1 <= len(found) <= 2
        if not is_right or not all(isinstance(x, Tensor) and x.dim() == 2 and len(x) == len(images) for x in found):
            raise FeatureError(f"{self.path} must return features (images, width), or features and logits")
        if not all(torch.isfinite(x).all() for x in found):
            raise FeatureError(f"{self.path} returns features that are not finite")
        if len(found) == 1:
            return ImageFeatures(found[0], None)
        return ImageFeatures(found[0], found[1] if self._returns_probabilities else found[1].softmax(1))

    def _run(self, images: Tensor) -> Any:
        """Features, and logits if there are any; TorchScript's Inception returns probabilities instead."""
        if not self._takes_bytes:
            found = self._network(images)
            return (found,) if isinstance(found, Tensor) else found
        pixels = ((images + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
        pixels = pixels.expand(-1, 3, -1, -1)  # greyscale images too
        if not self._returns_probabilities:
            return self._network(pixels / 127.5 - 1.0)
        return self._network(pixels, return_features=True), self._network(pixels, **self._options)


def _load_torchscript(path: Path) -> Any:
    try:
        found: Any = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError, OSError) as error:
        raise FeatureError(f"{path} cannot be loaded as TorchScript: {first_line(error)}") from error
    if not hasattr(found, "forward"):
        raise FeatureError(f"{path} has no function forward")
    return found.eval()


def _argument_names(network: Any) -> list[str]:
    """Names of the arguments of a TorchScript network; none for our own."""
    return [] if isinstance(network, Inception) else [one.name for one in network.forward.schema.arguments]


def look(network: FeatureNetwork, batches: Iterator[Tensor]) -> ImageFeatures:
    """Compute and concatenate the features of batches of images."""
    seen = [network(batch) for batch in batches]
    probabilities = [one.probabilities for one in seen if one.probabilities is not None]
    return ImageFeatures(torch.cat([one.features for one in seen]), torch.cat(probabilities) if probabilities else None)
