"""Random choices as functions of the seed and the step, so that a resumed run repeats them."""

from __future__ import annotations

import hashlib

import torch

from smyrf.seeds import SEED_LIMIT


def step_seed(*numbers: int) -> int:
    """Derive a seed from several numbers, such as a run's seed, a step and a rank.

    Example:
        >>> step_seed(0, 1) == step_seed(0, 1) != step_seed(1, 0)
        True
    """
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") % SEED_LIMIT


class ImageOrder:
    """A random order of images for each epoch, without end.

    Args:
        n: number of images.
        seed: seed of the orders.

    Example:
        >>> order = ImageOrder(5, seed=0)
        >>> sorted(order.take(0, 5)), order.take(3, 4) == order.take(0, 10)[3:7]
        ([0, 1, 2, 3, 4], True)
    """

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed = n, seed
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def take(self, start: int, n: int) -> list[int]:
        """Indices of `n` images from position `start`."""
        found = []
        for place in range(start, start + n):
            epoch, inside = divmod(place, self.n)
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(step_seed(self.seed, epoch))
                self._epoch, self._permutation = epoch, torch.randperm(self.n, generator=generator)
            found.append(int(self._permutation[inside]))
        return found
