"""Heads by layer, and methods by family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from smyrf.tools.analysis.inspection import HeadInspection, Outcome

# Errors below this are rounding.
ROUNDING = 1e-5


@dataclass(frozen=True)
class HeadSet:
    """Heads that share a row of a table.

    Args:
        label: of the row.
        heads: at least one.
    """

    label: str
    heads: tuple[HeadInspection, ...]

    def mean(self, of: Callable[[HeadInspection], float]) -> float:
        """Mean of a number over the heads."""
        return fmean(of(head) for head in self.heads)

    def outcome(self, method: int, of: Callable[[Outcome], float]) -> float:
        """Mean over the heads of a number of a method's outcome."""
        return fmean(of(head.outcomes[method]) for head in self.heads)

    def error(self, method: int) -> float:
        """‖output − dense‖ / ‖dense‖ over all heads together."""
        squares = [head.profile.output_square for head in self.heads]
        errors = [head.outcomes[method].error ** 2 * square for head, square in zip(self.heads, squares, strict=True)]
        return float((sum(errors) / sum(squares)) ** 0.5) if sum(squares) else 0.0


def by_layer(heads: Sequence[HeadInspection]) -> list[HeadSet]:
    """A row for each layer, in order."""
    layers: dict[int, list[HeadInspection]] = {}
    for head in heads:
        layers.setdefault(head.layer, []).append(head)
    return [HeadSet(str(layer), tuple(its)) for layer, its in layers.items()]


def by_head(heads: Sequence[HeadInspection]) -> list[HeadSet]:
    """A row for each head."""
    return [HeadSet(f"{head.layer}.{head.head}", (head,)) for head in heads]


def by_family(heads: Sequence[HeadInspection]) -> dict[str, list[int]]:
    """Indices of the methods of each family, by key visits; methods that are exact in all heads are left out."""
    found: dict[str, list[int]] = {}
    for i, one in enumerate(heads[0].outcomes):
        if any(head.outcomes[i].error > ROUNDING for head in heads):
            found.setdefault(one.method.family, []).append(i)
    for numbers in found.values():
        numbers.sort(key=lambda i: heads[0].outcomes[i].share)
    return found
