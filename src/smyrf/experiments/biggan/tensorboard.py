"""TensorBoard: losses, budgets and grids of a training run as curves and pictures, if it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from smyrf.methods import Method, Smyrf, Tangent

if TYPE_CHECKING:
    from smyrf.experiments.biggan.train import Losses


class Board:
    """Event files in a run's folder.

    Args:
        folder: for the files.
        step: that the run is at: what a killed run has written of later steps is not shown.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def add_losses(self, losses: Losses) -> None:
        """Losses and scores, each a curve."""
        for name in ("generator", "discriminator"):
            self._add(f"loss/{name}", getattr(losses, name), losses.step)
        for name in ("real", "fake"):
            self._add(f"score/{name}", getattr(losses, name), losses.step)

    def add_methods(self, methods: dict[str, Method], step: int) -> None:
        """The budget of each layer that has one: rounds of Smyrf, key visits of Tangent."""
        for layer, method in methods.items():
            if isinstance(method, Smyrf):
                self._add(f"rounds/{layer}", method.n_hashes, step)
            elif isinstance(method, Tangent):
                self._add(f"budget/{layer}", method.budget, step)

    def add_grid(self, image: Tensor, step: int) -> None:
        """A grid of images, ``(3, height, width)`` bytes."""
        self._writer.add_image("images", image, step)
        self._writer.flush()

    def _add(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)
