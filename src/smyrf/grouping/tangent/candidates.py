"""The keys that a level looks at: all of them at first, then those that the level above has kept.

Shapes: R rows (heads), M keys, D width, E value width; A clusters of the level above, n candidates of each, f clusters
        of this level below each, S kept keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from smyrf.backends.torch.workspace import Workspace
from smyrf.grouping.tangent.tree import take

# Scores, and elements of gathered candidates, that are in memory at once: some megabytes.
MAX_SCORES = 1 << 20
MAX_GATHERED = 1 << 21


@dataclass
class Candidates:
    """Keys in the tree's order with what is known of each, and the candidates of a level among them.

    Args:
        vectors: ``(R·M, D + E)``, each key with its value behind it.
        hidden: ``(R, M)`` bool, True = masked, or None.
        candidates: ``(A, n)``, the rows of `vectors` that each cluster of the level above has kept; at first
            A = R and n = M, all keys.
        everything: the candidates are all keys.
    """

    vectors: Tensor
    hidden: Tensor | None
    candidates: Tensor
    everything: bool = True

    @classmethod
    def all_keys(cls, k: Tensor, v: Tensor, mask: Tensor | None, order: Tensor, scratch: Workspace) -> Candidates:
        """All keys of k ``(R, M, D)``, v ``(R, M, E)`` and mask ``(R, M)``, in the given order ``(R, M)``."""
        width = k.shape[-1]
        vectors = scratch.get("vectors", (*order.shape, width + v.shape[-1]), k.dtype)
        step = max(1, MAX_SCORES // (len(k) * vectors.shape[-1]))
        for first in range(0, order.shape[1], step):  # so that the buffer between stays small
            part = order[:, first : first + step]
            for x, columns in ((k, slice(0, width)), (v, slice(width, None))):
                out = scratch.get("ordered", (part.numel(), x.shape[-1]), x.dtype)
                vectors[:, first : first + step, columns] = take(x, part, out)
        return cls(
            vectors=vectors.flatten(0, 1),
            hidden=None if mask is None else ~mask.gather(1, order),
            candidates=torch.arange(order.numel(), device=k.device).view_as(order),
        )

    def gather(self, at: slice, scratch: Workspace) -> Tensor:
        """Keys and values of some clusters' candidates, ``(a, n, D + E)``."""
        if self.everything:
            return self.vectors.view(*self.candidates.shape, -1)[at]
        rows, width = self.candidates[at], self.vectors.shape[-1]
        out = scratch.get("candidates", (rows.numel(), width), self.vectors.dtype)
        return torch.index_select(self.vectors, 0, rows.reshape(-1), out=out).view(*rows.shape, width)

    def of(self, x: Tensor, at: slice) -> Tensor:
        """What is known of some clusters' candidates: x ``(R, M)``, of all keys, as ``(a, n)``."""
        return x[at] if self.everything else x.view(-1)[self.candidates[at]]

    def score(self, centroids: Tensor, vectors: Tensor, at: slice, scratch: Workspace) -> Tensor:
        """T = q̄·k, ``(a, f, n)``, of gathered candidates; -inf where masked."""
        keys = vectors[..., : centroids.shape[-1]]
        shape = (*centroids.shape[:2], keys.shape[1])
        scores = torch.bmm(centroids, keys.transpose(1, 2), out=scratch.get("T", shape, keys.dtype))
        return self.hide(scores, at)

    def hide(self, scores: Tensor, at: slice) -> Tensor:
        """Puts -inf where a candidate is masked, in place."""
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
    step = max(1, MAX_SCORES // (fan * n))
    if not keys.everything:
        step = max(1, min(step, MAX_GATHERED // (n * keys.vectors.shape[-1])))
    fan_step = fan if step > 1 else max(1, MAX_SCORES // n)
    for first in range(0, n_above, step):
        for start in range(0, fan, fan_step):
            yield slice(first, min(first + step, n_above)), slice(start, min(start + fan_step, fan))
