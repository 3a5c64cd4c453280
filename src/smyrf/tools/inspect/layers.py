"""Heads put together by layer, and methods by family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from smyrf.tools.analysis.inspection import HeadInspection, Outcome

# Errors that are rounding and nothing else.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Row:
    """Heads that stand in one row of a table.

    Args:
        label: of the row.
        heads: at least one.
    """

    label: str
    heads: tuple[HeadInspection, ...]

    def mean(self, of: Callable[[HeadInspection], float]) -> float:
        """Of a number of each head."""
        return fmean(of(head) for head in self.heads)

    def outcome(self, method: int, of: Callable[[Outcome], float]) -> float:
        """Mean of a number of each head by a method."""
        return fmean(of(head.outcomes[method]) for head in self.heads)

    def error(self, method: int) -> float:
        """‖output − dense‖ / ‖dense‖ over the heads together."""
        squares = [head.character.output_square for head in self.heads]
        errors = [head.outcomes[method].error ** 2 * square for head, square in zip(self.heads, squares, strict=True)]
        return float((sum(errors) / sum(squares)) ** 0.5) if sum(squares) else 0.0


def by_layer(heads: Sequence[HeadInspection]) -> list[Row]:
    """A row for each layer, in order."""
    layers: dict[int, list[HeadInspection]] = {}
    for head in heads:
        layers.setdefault(head.layer, []).append(head)
    return [Row(str(layer), tuple(its)) for layer, its in layers.items()]


def by_head(heads: Sequence[HeadInspection]) -> list[Row]:
    """A row for each head."""
    return [Row(f"{head.layer}.{head.head}", (head,)) for head in heads]


def by_family(heads: Sequence[HeadInspection]) -> dict[str, list[int]]:
    """Numbers of the methods of each family, those with fewer key visits first; what is exact is in none.

    Where it is exact in all heads, a method is dense attention under another name.
    """
    found: dict[str, list[int]] = {}
    for i, one in enumerate(heads[0].outcomes):
        if any(head.outcomes[i].error > ROUNDING for head in heads):
            found.setdefault(one.method.family, []).append(i)
    for numbers in found.values():
        numbers.sort(key=lambda i: heads[0].outcomes[i].share)
    return found
