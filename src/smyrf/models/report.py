"""What became of the attention of a model, layer by layer, and of its calls since then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from smyrf.methods import Dense, Method


@dataclass
class Calls:
    """Attention calls, counted as they are made; those of a compiled graph are not seen.

    Args:
        served: by the method.
        dense: by dense attention instead, by reason.

    Example:
        >>> calls = Calls()
        >>> calls.by_method()
        >>> calls.by_dense("its mask adds a bias to the scores")
        >>> print(calls)
        1 call by the method, 1 dense: its mask adds a bias to the scores (1)
    """

    served: int = 0
    dense: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.served + sum(self.dense.values())

    def by_method(self) -> None:
        """Counts one that was served."""
        self.served += 1

    def by_dense(self, reason: str) -> None:
        """Counts one that was not."""
        self.dense[reason] += 1

    def __str__(self) -> str:
        text = f"{self.served} call{'s' * (self.served != 1)} by the method"
        if self.dense:
            reasons = ", ".join(f"{reason} ({n})" for reason, n in self.dense.most_common())
            text += f", {sum(self.dense.values())} dense: {reasons}"
        return text


@dataclass
class Layer:
    """One attention module of a model.

    Args:
        name: of the module in the model.
        method: by which it attends.
        from_keys: with fewer keys than this it attends densely.
        window: with more keys than this it attends densely: it has a sliding window.
        reason: why it was left dense; "" if it was replaced.
        calls: since it was replaced.
    """

    name: str
    method: Method
    from_keys: int = 0
    window: int | None = None
    reason: str = ""
    calls: Calls = field(default_factory=Calls)

    @property
    def replaced(self) -> bool:
        return not self.reason

    def cells(self) -> tuple[str, str, str]:
        """Name, method and remark, as text."""
        method = "dense" if self.reason or isinstance(self.method, Dense) else self.method.label
        remarks = [f"dense below {self.from_keys:,} keys"] if self.from_keys else []
        remarks += [f"dense beyond its window of {self.window:,} tokens"] if self.window else []
        return self.name, method, self.reason or "; ".join(remarks)


@dataclass(frozen=True)
class Report:
    """The layers of a model: replaced, or left dense and why. Counts of calls go on as the model runs.

    Example:
        >>> import smyrf
        >>> layers = (Layer("layers.0", smyrf.Tangent(0.25)), Layer("layers.1", smyrf.Dense(), reason="sliding window"))
        >>> report = Report("BertModel", layers)
        >>> [layer.name for layer in report.replaced], [layer.reason for layer in report.dense]
        (['layers.0'], ['sliding window'])
        >>> print(report)
        BertModel: 1 of 2 attention layers replaced
        layers.0  Tangent 25%
        layers.1  dense        sliding window
    """

    model: str
    layers: tuple[Layer, ...]

    @property
    def replaced(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.replaced)

    @property
    def dense(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if not layer.replaced)

    @property
    def calls(self) -> Calls:
        """Those of all layers."""
        return add_calls(layer.calls for layer in self.layers)

    def __str__(self) -> str:
        head = f"{self.model}: {len(self.replaced)} of {len(self.layers)} attention layers replaced"
        lines = [head, *align([layer.cells() for layer in self.layers])]
        if self.calls.total:
            lines.append(str(self.calls))
        return "\n".join(lines)


def add_calls(calls: Iterable[Calls]) -> Calls:
    """All of them in one.

    Example:
        >>> add_calls([Calls(2), Calls(3)]).served
        5
    """
    found = Calls()
    for one in calls:
        found.served += one.served
        found.dense += one.dense
    return found


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, the columns below each other.

    Example:
        >>> align([("a", "bc"), ("def", "g")])
        ['a    bc', 'def  g']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
