"""Write losses, budgets and image grids of a training run for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from smyrf.methods import Method, Smyrf, Tangent

if TYPE_CHECKING:
    from smyrf.experiments.biggan.train import Losses


class Board:
    """Writer of event files.

    Args:
        folder: folder of the files.
        step: current step of the run; events of later steps, from a killed run, are hidden.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def add_losses(self, losses: Losses) -> None:
        """Write losses and scores."""
        for name in ("generator", "discriminator"):
            self._add(f"loss/{name}", getattr(losses, name), losses.step)
        for name in ("real", "fake"):
            self._add(f"score/{name}", getattr(losses, name), losses.step)

    def add_methods(self, methods: dict[str, Method], step: int) -> None:
        """Write the budget of each layer: rounds of Smyrf, budget of Tangent."""
        for layer, method in methods.items():
            if isinstance(method, Smyrf):
                self._add(f"rounds/{layer}", method.n_hashes, step)
            elif isinstance(method, Tangent):
                self._add(f"budget/{layer}", method.budget, step)

    def add_grid(self, image: Tensor, step: int) -> None:
        """Write a grid of images, uint8 ``(3, height, width)``."""
        self._writer.add_image("images", image, step)
        self._writer.flush()

    def _add(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)
