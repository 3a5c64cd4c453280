"""Which images a step sees, and its chance, as functions of the step: a run that goes on sees no others."""

from __future__ import annotations

import hashlib

import torch

SEED_LIMIT = 2**62


def step_seed(*numbers: int) -> int:
    """One seed of several numbers, such as a run's seed, a step and a process.

    Example:
        >>> step_seed(0, 1) == step_seed(0, 1) != step_seed(1, 0)
        True
    """
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") % SEED_LIMIT


class Order:
    """All images in an order of chance, again and again, each time in another.

    Args:
        n: images.
        seed: of the orders.

    Example:
        >>> order = Order(5, seed=0)
        >>> sorted(order.take(0, 5)), order.take(3, 4) == order.take(0, 10)[3:7]
        ([0, 1, 2, 3, 4], True)
    """

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed = n, seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def take(self, start: int, n: int) -> list[int]:
        """The images from the `start`-th on."""
        found = []
        for place in range(start, start + n):
            epoch, inside = divmod(place, self.n)
            if epoch != self._epoch:
                chance = torch.Generator().manual_seed(step_seed(self.seed, epoch))
                self._epoch, self._permutation = epoch, torch.randperm(self.n, generator=chance)
            found.append(int(self._permutation[inside]))
        return found
