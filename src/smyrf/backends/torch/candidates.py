"""The keys that a level looks at: all of them at first, then those that the level above has kept.

Shapes: R rows (heads), M keys, D width, E value width; A clusters of the level above, n candidates of each, f clusters
        of this level below each, S kept keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from smyrf.backends.torch.rows import take
from smyrf.backends.torch.workspace import Workspace

# Scores, and elements of gathered candidates, that are in memory at once: some megabytes.
MAX_SCORES = 1 << 20
MAX_GATHERED = 1 << 21


@dataclass
class Candidates:
    """Keys and values of R rows in the order of the tree, and the candidates of a level among them.

    Args:
        vectors: ``(R·M, D + E)``, each key followed by its value.
        is_hidden: ``(R, M)`` bool, True = masked, or None.
        places: ``(A, n)`` int32, the candidates of each cluster of the level above, as places in the order of their
            row; None while they are all keys, where A = R and n = M.
        n_rows: R.
    """

    vectors: Tensor
    is_hidden: Tensor | None
    n_rows: int
    places: Tensor | None = None

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
        hidden = None if mask is None else ~mask.gather(1, order.long())
        return cls(vectors.flatten(0, 1), hidden, len(k))

    @property
    def shape(self) -> tuple[int, int]:
        """(A, n)."""
        if self.places is None:
            return self.n_rows, len(self.vectors) // self.n_rows
        return self.places.shape[0], self.places.shape[1]

    def vector_rows(self, at: slice) -> Tensor:
        """Rows of `vectors` that are the candidates of some clusters, ``(a, n)``."""
        n_keys = len(self.vectors) // self.n_rows
        if self.places is None:
            return torch.arange(at.start * n_keys, at.stop * n_keys, device=self.vectors.device).view(-1, n_keys)
        clusters = torch.arange(at.start, at.stop, device=self.vectors.device)
        return self.places[at] + (clusters // (len(self.places) // self.n_rows) * n_keys)[:, None]

    def gather(self, at: slice, scratch: Workspace) -> Tensor:
        """Keys and values of some clusters' candidates, ``(a, n, D + E)``."""
        width = self.vectors.shape[-1]
        if self.places is None:
            return self.vectors.view(*self.shape, width)[at]
        rows = self.vector_rows(at)
        out = scratch.get("candidates", (rows.numel(), width), self.vectors.dtype)
        return torch.index_select(self.vectors, 0, rows.view(-1), out=out).view(*rows.shape, width)

    def of(self, x: Tensor, at: slice) -> Tensor:
        """What x ``(R, M)`` holds for some clusters' candidates, ``(a, n)``."""
        return x[at] if self.places is None else x.view(-1)[self.vector_rows(at)]

    def score(self, centroids: Tensor, vectors: Tensor, at: slice, scratch: Workspace) -> Tensor:
        """T = q̄·k, ``(a, f, n)``, of gathered candidates; -inf where masked."""
        keys = vectors[..., : centroids.shape[-1]]
        shape = (*centroids.shape[:2], keys.shape[1])
        scores = torch.bmm(centroids, keys.transpose(1, 2), out=scratch.get("T", shape, keys.dtype))
        return self.hide(scores, at)

    def hide(self, scores: Tensor, at: slice) -> Tensor:
        """Put -inf where a candidate is masked, in place."""
        if self.is_hidden is not None:
            scores.masked_fill_(self.of(self.is_hidden, at)[:, None], -torch.inf)
        return scores

    def blocks(self, fan: int) -> Iterator[tuple[slice, slice]]:
        """Cut the clusters (A, f) of a level so that scores and gathered candidates stay small."""
        n_above, n = self.shape
        step = max(1, MAX_SCORES // (fan * n))
        if self.places is not None:
            step = max(1, min(step, MAX_GATHERED // (n * self.vectors.shape[-1])))
        fan_step = fan if step > 1 else max(1, MAX_SCORES // n)
        for first in range(0, n_above, step):
            for start in range(0, fan, fan_step):
                yield slice(first, min(first + step, n_above)), slice(start, min(start + fan_step, fan))


def narrow(places: Tensor | None, kept: Tensor) -> Tensor:
    """The candidates of the next level: what the clusters ``(A, f)`` have kept ``(A, f, S)``, as ``(A·f, S)`` int32.

    Args:
        places: ``(A, n)``, the candidates of this level; None if they are all keys.
        kept: places among these candidates.
    """
    if places is None:
        return kept.flatten(0, 1)
    many = places[:, None].expand(-1, kept.shape[1], -1)
    return many.gather(2, kept.long()).flatten(0, 1)
