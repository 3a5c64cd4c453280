"""Which heads are hard to approximate, and what they have in common.

The error of a method on each head is correlated with measures of the head by Spearman's rank correlation ρ, with a
p-value from random permutations. The reasons given for a hard head are the measures that correlate with the error in
this model *and* for which this head is in the outer fifth. A correlation over the heads of one model proves no cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smyrf.methods import Method
from smyrf.tools.analysis.inspection import HeadInspection

# Permutations of a test; significance level over all measures; fewest heads to test.
PERMUTATIONS, LEVEL, LEAST_HEADS = 9999, 0.05, 8
# Share of heads that are called hard, share of heads in the outer range of a measure, and most reasons to name.
HARD, OUTER, MOST_REASONS = 0.1, 0.2, 3


class Measure(NamedTuple):
    """A number of each head that may correlate with its error.

    Args:
        name: its name in tables.
        high, low: what a large or a small value means.
        of: the number; None if it was not measured.
    """

    name: str
    high: str
    low: str
    of: Callable[[HeadInspection, int], float | None]


MEASURES = (
    Measure(
        "entropy",
        "its weights are spread over many keys",
        "its weights lie on few keys",
        lambda head, _: head.entropy_share,
    ),
    Measure(
        "effective rank",
        "its singular values decay slowly",
        "its singular values decay fast",
        lambda head, _: None if head.spectrum is None else head.spectrum.effective_rank,
    ),
    Measure(
        "heaviest key",
        "one key takes much of the weight of all queries",
        "no key matters to all queries",
        lambda head, _: head.profile.heaviest_key,
    ),
    Measure(
        "alike",
        "its queries attend to the same keys",
        "each query attends to its own keys",
        lambda head, _: head.profile.alike,
    ),
    Measure(
        "query spread",
        "its scores differ much between queries",
        "its scores differ little between queries",
        lambda head, _: head.profile.query_spread,
    ),
    Measure(
        "off mean",
        "its output is far from the mean of the values",
        "its output is near the mean of the values",
        lambda head, _: head.profile.off_mean,
    ),
    Measure(
        "missed mass",
        "its clusters miss keys that hold its mass",
        "its clusters contain the keys that hold its mass",
        lambda head, method: head.outcomes[method].best - head.outcomes[method].captured,
    ),
)


@dataclass(frozen=True)
class Correlation:
    """Correlation of a measure with the error, over the heads.

    Args:
        measure: its name.
        rho: Spearman's rank correlation.
        p: share of permutations with an |ρ| at least as large.
        holds: whether p is below `LEVEL` divided by the number of measures.
    """

    measure: str
    rho: float
    p: float
    holds: bool


@dataclass(frozen=True)
class HardHead:
    """One of the heads with the largest errors.

    Args:
        reasons: what is unusual about it and correlates with the error in this model, strongest first; may be empty.
    """

    layer: int
    head: int
    error: float
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        why = "; ".join(self.reasons) or "nothing that was measured explains it"
        return f"layer {self.layer} head {self.head}, error {self.error:.3f}: {why}"


@dataclass(frozen=True)
class Hardness:
    """What makes heads hard for one method.

    Args:
        median_error: over the heads.
        hard: the heads with the largest errors, largest first.
        correlations: strongest first; empty if there are too few heads.
    """

    method: Method
    n_heads: int
    median_error: float
    hard: tuple[HardHead, ...]
    correlations: tuple[Correlation, ...]

    @property
    def summary(self) -> str:
        """What correlates with the error, in one sentence."""
        if not self.correlations:
            return f"{self.n_heads} heads are too few to say what makes them hard"
        kept = [f"{one.measure} (ρ = {one.rho:+.2f})" for one in self.correlations if one.holds]
        if not kept:
            return f"no measure correlates with the error over the {self.n_heads} heads"
        return f"over {self.n_heads} heads the error correlates with {', '.join(kept)}"

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        label = self.method.label
        return asdict(self) | {"method": self.method.to_dict(), "label": label, "summary": self.summary}


def hardness(heads: Sequence[HeadInspection], method: int, seed: int = 0) -> Hardness:
    """What correlates with the error of a method over the heads, and which heads are hardest.

    Args:
        heads: from `smyrf.tools.analysis.inspection.inspect_heads`.
        method: number of the method among their outcomes.
        seed: of the permutations.

    Example:
        >>> from smyrf import Smyrf
        >>> from smyrf.call import Call
        >>> from smyrf.tools.analysis.inspection import inspect_heads
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(1, 12, 64, 8) * torch.linspace(0.3, 3.0, 12).view(12, 1, 1)
        >>> heads = list(inspect_heads([Call(x, x, torch.randn(1, 12, 64, 8), 0.35)], [Smyrf(1, 16)]))
        >>> found = hardness(heads, 0)
        >>> found.correlations[0].holds, len(found.hard)
        (True, 1)
    """
    if not heads:
        raise ValueError("heads must hold at least one head")
    errors = [head.outcomes[method].error for head in heads]
    measured = {}
    for measure in MEASURES:
        values = [measure.of(head, method) for head in heads]
        if all(value is not None for value in values) and len(set(values)) > 1:
            measured[measure.name] = torch.tensor(values, dtype=torch.float64)
    correlations: list[Correlation] = []
    if len(heads) >= LEAST_HEADS and len(set(errors)) > 1:
        level = LEVEL / max(1, len(measured))
        for name, numbers in measured.items():
            rho, p = spearman(numbers, torch.tensor(errors, dtype=torch.float64), seed)
            correlations.append(Correlation(name, rho, p, p < level))
        correlations.sort(key=lambda one: -abs(one.rho))
    hardest = sorted(range(len(heads)), key=lambda i: -errors[i])[: max(1, round(HARD * len(heads)))]
    hard = [
        HardHead(heads[i].layer, heads[i].head, errors[i], tuple(_reasons(i, measured, correlations))) for i in hardest
    ]
    chosen = heads[0].outcomes[method].method
    return Hardness(chosen, len(heads), median(errors), tuple(hard), tuple(correlations))


def spearman(a: Tensor, b: Tensor, seed: int = 0) -> tuple[float, float]:
    """Spearman's ρ of two sequences, and the share of random permutations whose |ρ| is at least as large.

    Example:
        >>> rho, p = spearman(torch.arange(20.0), torch.arange(20.0) ** 3)
        >>> round(rho, 6), p
        (1.0, 0.0001)
    """
    a, b = _ranks(a), _ranks(b)
    rho = float(a @ b)
    generator = torch.Generator().manual_seed(seed)
    shuffled = a[torch.rand(PERMUTATIONS, len(a), generator=generator).argsort(1)] @ b  # (permutations,)
    n_larger = int((shuffled.abs() >= abs(rho) - 1e-12).sum())
    return rho, (n_larger + 1) / (PERMUTATIONS + 1)


def _ranks(x: Tensor) -> Tensor:
    """Ranks, averaged over ties, with mean 0 and norm 1."""
    _, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    places = (last - (counts - 1) / 2)[inverse]
    places = places - places.mean()
    return places / places.norm().clamp(min=1e-300)


def _reasons(i: int, measured: dict[str, Tensor], correlations: Sequence[Correlation]) -> list[str]:
    known = {measure.name: measure for measure in MEASURES}
    reasons = []
    for one in correlations:
        values = measured[one.measure]
        beyond = float((values > values[i] if one.rho > 0 else values < values[i]).double().mean())
        if one.holds and beyond < OUTER:
            words = known[one.measure].high if one.rho > 0 else known[one.measure].low
            reasons.append(f"{words} ({one.measure} {float(values[i]):.3g}, median {float(values.median()):.3g})")
    return reasons[:MOST_REASONS]
