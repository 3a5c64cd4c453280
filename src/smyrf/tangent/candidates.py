"""The keys that a level looks at: all of them at first, then those that the level above has kept.

Shapes: R rows (heads), M keys, D width, E value width; A clusters of the level above, n candidates of each, f clusters
        of this level below each, S kept keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from smyrf.kernels.workspace import Workspace
from smyrf.tangent.tree import take

# Scores, and elements of gathered candidates, that are in memory at once: some megabytes.
MAX_SCORES = 1 << 19
MAX_GATHERED = 1 << 20


@dataclass
class Candidates:
    """Keys in the tree's order with what is known of each, and the candidates of a level among them.

    Args:
        keys: ``(R·M, D)``.
        values: ``(R·M, E)``.
        hidden: ``(R, M)`` bool, True = masked, or None.
        candidates: ``(A, n)``, the rows of `keys` that each cluster of the level above has kept; at first
            A = R and n = M, all keys.
        everything: the candidates are all keys.
    """

    keys: Tensor
    values: Tensor
    hidden: Tensor | None
    candidates: Tensor
    everything: bool = True

    @classmethod
    def all_keys(cls, k: Tensor, v: Tensor, mask: Tensor | None, order: Tensor, scratch: Workspace) -> Candidates:
        """All keys of k ``(R, M, D)``, v ``(R, M, E)`` and mask ``(R, M)``, in the given order ``(R, M)``."""
        return cls(
            keys=take(k, order, scratch.get("keys", (order.numel(), k.shape[-1]), k.dtype)).flatten(0, 1),
            values=take(v, order, scratch.get("values", (order.numel(), v.shape[-1]), v.dtype)).flatten(0, 1),
            hidden=None if mask is None else ~mask.gather(1, order),
            candidates=torch.arange(order.numel(), device=k.device).view_as(order),
        )

    def gather(self, at: slice, scratch: Workspace) -> tuple[Tensor, Tensor]:
        """Keys ``(a, n, D)`` and values ``(a, n, E)`` of some clusters' candidates."""
        rows = self.candidates[at]
        if self.everything:
            return self.keys.view(*self.candidates.shape, -1)[at], self.values.view(*self.candidates.shape, -1)[at]
        taken = []
        for name, x in (("candidate keys", self.keys), ("candidate values", self.values)):
            out = scratch.get(name, (rows.numel(), x.shape[-1]), x.dtype)
            taken.append(torch.index_select(x, 0, rows.reshape(-1), out=out).view(*rows.shape, -1))
        return taken[0], taken[1]

    def of(self, x: Tensor, at: slice) -> Tensor:
        """What is known of some clusters' candidates: x ``(R, M)``, of all keys, as ``(a, n)``."""
        return x[at] if self.everything else x.view(-1)[self.candidates[at]]

    def score(self, centroids: Tensor, keys: Tensor, at: slice, scratch: Workspace) -> Tensor:
        """T = q̄·k, ``(a, f, n)``; -inf where masked."""
        shape = (*centroids.shape[:2], keys.shape[1])
        scores = torch.bmm(centroids, keys.transpose(1, 2), out=scratch.get("T", shape, keys.dtype))
        if self.hidden is not None:
            scores.masked_fill_(self.of(self.hidden, at)[:, None], -torch.inf)
        return scores

    def keep(self, kept: Tensor) -> None:
        """Goes on with what the clusters have kept, ``(A, f, S)``."""
        many = self.candidates[:, None].expand(-1, kept.shape[1], -1)
        self.candidates = many.gather(2, kept).flatten(0, 1)  # (A·f, S)
        self.everything = False


def blocks(shape: tuple[int, int], keys: Candidates) -> Iterator[tuple[slice, slice]]:
    """Cuts the clusters (A, f) of a level so that scores and gathered candidates stay small."""
    n_above, fan = shape
    n = keys.candidates.shape[1]
    width = keys.keys.shape[-1] + keys.values.shape[-1]
    step = max(1, min(MAX_SCORES // (fan * n), MAX_GATHERED // (n * width) if not keys.everything else n_above))
    fan_step = fan if step > 1 else max(1, MAX_SCORES // n)
    for first in range(0, n_above, step):
        for start in range(0, fan, fan_step):
            yield slice(first, min(first + step, n_above)), slice(start, min(start + fan_step, fan))
