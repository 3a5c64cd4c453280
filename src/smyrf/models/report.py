"""Which layers were replaced, and how their calls were served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from smyrf.call import Reason
from smyrf.methods import Method


@dataclass
class Calls:
    """How attention calls were served, counted as they are made; calls of a compiled graph are not counted.

    Args:
        served: number of calls served by the method.
        dense: number of calls served by dense attention instead, by reason.

    Example:
        >>> calls = Calls()
        >>> calls.count(None)
        >>> calls.count(Reason.BIAS)
        >>> print(calls)
        1 call by the method, 1 dense: its mask adds a bias to the scores (1)
    """

    served: int = 0
    dense: Counter[Reason] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.served + sum(self.dense.values())

    def count(self, reason: Reason | None) -> None:
        """Counts a call served by the method, or by dense attention for a reason."""
        if reason is None:
            self.served += 1
        else:
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
        method: its method.
        from_keys: with fewer keys it is dense.
        window: with more keys it is dense, because it has a sliding window.
        reason: why it was left dense; None if it was replaced.
        detail: the reason in the words for this layer; "" if `reason` says it all.
        calls: since it was replaced.

    Example:
        >>> import smyrf
        >>> layer = Layer("head", smyrf.Dense(), reason=Reason.NOT_DISPATCHED, detail="Pooler does not ask for it")
        >>> layer.replaced, layer.why
        (False, 'Pooler does not ask for it')
    """

    name: str
    method: Method
    from_keys: int = 0
    window: int | None = None
    reason: Reason | None = None
    detail: str = ""
    calls: Calls = field(default_factory=Calls)

    @property
    def replaced(self) -> bool:
        return self.reason is None

    @property
    def why(self) -> str:
        """Why it was left dense, as text; "" if it was replaced."""
        return self.detail or str(self.reason or "")

    def cells(self) -> tuple[str, str, str]:
        """Name, method and remark, as text."""
        method = self.method.label if self.replaced and not self.method.is_dense else "dense"
        remarks = [f"dense below {self.from_keys:,} keys"] if self.from_keys else []
        remarks += [f"dense beyond its window of {self.window:,} tokens"] if self.window else []
        return self.name, method, self.why or "; ".join(remarks)


@dataclass(frozen=True)
class Report:
    """The layers of a model, replaced or left dense with the reason. Calls are counted in it as the model runs.

    Example:
        >>> import smyrf
        >>> layers = (Layer("layers.0", smyrf.Tangent(0.25)), Layer("layers.1", smyrf.Dense(), reason=Reason.NOT_GIVEN))
        >>> report = Report("BertModel", layers)
        >>> [layer.name for layer in report.replaced], [layer.why for layer in report.dense]
        (['layers.0'], ['no method was given for it'])
        >>> print(report)
        BertModel: 1 of 2 attention layers replaced
        layers.0  Tangent 25%
        layers.1  dense        no method was given for it
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
        """Calls of all layers."""
        return add_calls(layer.calls for layer in self.layers)

    def __str__(self) -> str:
        head = f"{self.model}: {len(self.replaced)} of {len(self.layers)} attention layers replaced"
        lines = [head, *align([layer.cells() for layer in self.layers])]
        if self.calls.total:
            lines.append(str(self.calls))
        return "\n".join(lines)


def add_calls(calls: Iterable[Calls]) -> Calls:
    """The sum of several counts.

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
    """Rows of cells as lines of text with aligned columns.

    Example:
        >>> align([("a", "bc"), ("def", "g")])
        ['a    bc', 'def  g']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
