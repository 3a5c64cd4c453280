"""`tune`: for each layer of a model, the cheapest method and size that keep its error below a target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smyrf.backends import check_backend
from smyrf.call import Call, why_dense
from smyrf.methods import Dense, Method, PerHead, Tangent, check_method
from smyrf.models.calls import given_calls, model_calls
from smyrf.models.plan import LayerPlan, Plan
from smyrf.seeds import check_seed
from smyrf.tuning.estimate import Sample, relative
from smyrf.tuning.machine import machine_summary
from smyrf.tuning.timing import timing

# Key visits of the smallest budget that is tried, and the share of the keys above which nothing is saved.
LEAST, MOST = 32, 0.9
# Budgets are found up to this factor.
PRECISION = 1.05
# A method is chosen if it takes at most this share of dense attention's time; the rest is noise.
FASTER = 0.95
# A larger budget may be faster than a smaller one, but not by more than this factor.
SPREAD = 0.75
# Further budgets to choose two from, as multiples of the best.
AROUND = (0.5, 0.7, 1.4, 2.0)
# Two budgets for the heads of a layer are chosen if they take at most this share of one budget's key visits.
WORTH_SPLITTING = 0.9

CHEAPEST = "cheapest that fits"
AS_FAST = "dense is as fast at this length"
NONE_FITS = "nothing cheaper fits"
TOO_SHORT = "too short to save anything"


def tune(
    model_or_qkv: nn.Module | Sequence[Any],
    batch: Any = None,
    *,
    max_error: float = 0.05,
    candidates: Sequence[Method] | None = None,
    fallback: bool = True,
    documents: int = 4,
    rows: int = 256,
    seed: int = 0,
    backend: str | None = None,
) -> Plan:
    """Choose for each attention call the cheapest method that keeps its relative output error below a target.

    The error ‖output − dense‖ / ‖dense‖ is estimated on a sample of rows for which dense attention is computed, on
    the worst of a few documents. Without `candidates` the budget of `Tangent` is found by bisection, and the heads
    of a layer get two budgets if that saves at least a tenth of the key visits.

    Args:
        model_or_qkv: a model, whose calls of ``F.scaled_dot_product_attention`` are captured, or the inputs of
            such calls: one (q, k, v), or a sequence of (q, k, v) or (q, k, v, scale).
        batch: for the model: a mapping of keyword arguments, a tuple or list of arguments, or the only argument.
        max_error: the target for each layer.
        candidates: methods to choose from instead.
        fallback: keep dense attention where it is as fast on this machine (measured and cached), and choose by
            time. Without it the choice is only by key visits.
        documents: rows of the batch on which errors are estimated, at most.
        rows: queries in the sample of a document.
        seed: of the sample, and of methods with random clusters.
        backend: with which errors and times are measured, as in `smyrf.attention`; the plan records it, and
            `smyrf.replace_attention` uses it.

    Returns:
        a plan: ``plan.methods`` in the order of the calls, and a report: ``print(plan)``.

    Example:
        >>> import torch, smyrf
        >>> q, k, v = torch.randn(3, 1, 4, 500, 16).unbind()
        >>> plan = smyrf.tune((q, k, v), max_error=0.2, fallback=False)
        >>> plan.layers[0].error <= 0.2, plan.layers[0].key_visits < 500
        (True, True)
    """
    check_target(max_error)
    if candidates is not None:
        if not isinstance(candidates, Sequence):
            raise TypeError(f"{candidates=} must be a sequence of methods")
        candidates = tuple(candidates)
        if not candidates:
            raise ValueError("candidates=() leaves nothing to choose from")
        for method in candidates:
            check_method(method)
    check_counts(documents=documents, rows=rows)
    check_seed(seed)
    check_backend(backend)
    if not isinstance(fallback, bool):
        raise TypeError(f"{fallback=} must be a bool")

    if isinstance(model_or_qkv, nn.Module):
        if batch is None:
            raise ValueError("batch=None: a model needs a batch to be run on")
        calls = model_calls(model_or_qkv, batch)
    elif isinstance(model_or_qkv, Sequence):
        if batch is not None:
            raise ValueError("batch must be left out if q, k and v are given")
        calls = given_calls(model_or_qkv)
    else:
        raise TypeError(
            f"model_or_qkv must be a torch.nn.Module or a sequence of (q, k, v), not {type(model_or_qkv).__name__}"
        )
    layers = plan_layers(
        calls,
        max_error,
        candidates=candidates,
        fallback=fallback,
        documents=documents,
        rows=rows,
        seed=seed,
        backend=backend,
    )
    return Plan(tuple(layers), float(max_error), machine_summary(backend) if fallback else "", backend)


def check_target(max_error: object) -> None:
    """Raises unless `max_error` is a number between 0 and 1."""
    if not isinstance(max_error, int | float) or isinstance(max_error, bool):
        raise TypeError(f"{max_error=} must be a number")
    if not 0.0 < max_error < 1.0:
        raise ValueError(f"{max_error=} must be between 0 and 1")


def check_counts(**counts: object) -> None:
    """Raises unless each is an int of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be an int")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def plan_layers(
    calls: Sequence[Call],
    max_error: float,
    *,
    candidates: Sequence[Method] | None = None,
    fallback: bool = True,
    documents: int = 4,
    rows: int = 256,
    seed: int = 0,
    backend: str | None = None,
) -> Iterator[LayerPlan]:
    """The choices of `tune` one by one, so that progress can be shown."""
    for index, call in enumerate(calls):
        fits: list[Fit] = []
        unserved = why_dense(call)
        if unserved is None:
            n_documents = min(documents, len(call.q))
            call = call.take([i * len(call.q) // n_documents for i in range(n_documents)])
            trials = Trials(call, rows, seed, backend)
            if candidates is None:
                fits, reason = _bisected(trials, max_error, fallback)
            else:
                fits, reason = _listed(trials, candidates, max_error)
        else:
            reason = str(unserved)
        method, error, speedup = _choose(call, fits, fallback, backend)
        if fits and method.is_dense:
            reason = AS_FAST
        from_keys = _from_keys(call, method, backend) if fallback and not method.is_dense else 0
        visits = call.key_visits(method)
        yield LayerPlan(index, method, visits, call.n_keys, error, speedup, reason, call.name, from_keys)


class Fit(NamedTuple):
    """A method whose error is within the target, and its error."""

    method: Method
    error: float


class Trials:
    """Errors of methods on the documents of a call; each method is run once.

    Args:
        call: its batch holds the documents.
        rows: queries in the sample of each document.
        seed: of the first document; the others count on from it.
        backend: for the methods; None for the best.

    Example:
        >>> x = torch.randn(2, 3, 100, 8)
        >>> Trials(Call(x, x, x, 0.3), rows=10, seed=0).square_errors(Tangent(50)).shape
        torch.Size([2, 3])
    """

    def __init__(self, call: Call, rows: int, seed: int, backend: str | None = None) -> None:
        self.call = call
        self.rows = rows
        self.seed = seed
        self.backend = backend
        self.found: dict[Method, Tensor] = {}

    @cached_property
    def samples(self) -> list[Sample]:
        """One per document."""
        return [Sample(self.call.take([i]), self.rows, self.seed + i, self.backend) for i in range(len(self.call.q))]

    @cached_property
    def squares(self) -> Tensor:
        """‖exact‖² over the sample: ``(documents, heads)``."""
        return torch.stack([sample.squares for sample in self.samples])

    def square_errors(self, method: Method) -> Tensor:
        """‖output − exact‖² over the sample: ``(documents, heads)``."""
        if method not in self.found:
            self.found[method] = torch.stack([sample.square_errors(method) for sample in self.samples])
        return self.found[method]

    def worst(self, square_errors: Tensor) -> float:
        """Relative error on the document with the greatest one; NaN if any is NaN."""
        errors = torch.tensor([relative(*pair) for pair in zip(square_errors, self.squares, strict=True)])
        return float(errors.max())

    def error(self, method: Method) -> float:
        """Relative error of a method on its worst document."""
        return self.worst(self.square_errors(method))


def _listed(trials: Trials, candidates: Sequence[Method], max_error: float) -> tuple[list[Fit], str]:
    """The candidates whose error is within the target, cheapest first, and a reason."""
    fits = [Fit(method, error) for method in candidates if (error := trials.error(method)) <= max_error]
    fits.sort(key=lambda fit: trials.call.key_visits(fit.method))
    return fits, CHEAPEST if fits else NONE_FITS


def _bisected(trials: Trials, max_error: float, fallback: bool) -> tuple[list[Fit], str]:
    """Two budgets for the heads if that saves enough, the smallest budget for all heads, and a reason.

    With `fallback` the search ends as soon as a budget that is too small is slower than dense attention.
    """
    call, backend = trials.call, trials.backend
    least = LEAST / call.n_keys
    if least > MOST or call.plan(_tangent(least)).is_exact:
        return [], TOO_SHORT
    if fallback and timing(call, _tangent(least), backend).speedup < SPREAD:
        return [], AS_FAST
    low, high = least, least if trials.error(_tangent(least)) <= max_error else 1.0
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        if trials.error(_tangent(middle)) <= max_error:
            high = middle
            continue
        low = middle
        if fallback and timing(call, _tangent(low), backend).speedup < SPREAD:
            return [], AS_FAST
    one = _tangent(high)
    if high > MOST or call.plan(one).is_exact:
        return [], NONE_FITS
    fits = [Fit(one, trials.error(one))]
    for factor in AROUND:
        if least <= factor * high <= MOST:
            trials.error(_tangent(factor * high))
    two = _split(trials, max_error)
    if two is not None and call.key_visits(two) <= WORTH_SPLITTING * call.key_visits(one):
        by_head = [trials.square_errors(method)[:, head] for head, method in enumerate(two.methods)]
        fits.insert(0, Fit(two, trials.worst(torch.stack(by_head, dim=1))))
    return fits, CHEAPEST


def _split(trials: Trials, max_error: float) -> PerHead | None:
    """The cheapest pair of budgets among those tried: the larger one goes to the heads where it helps most.

    Heads are independent, so the error of every split is known without running it.
    """
    visits = trials.call.key_visits
    tried = sorted(trials.found, key=visits)
    totals = trials.squares.sum(1, keepdim=True)  # (documents, 1)
    best: PerHead | None = None
    for i, few in enumerate(tried):
        for many in tried[i + 1 :]:
            small, large = (trials.found[method] / totals for method in (few, many))  # (documents, heads)
            order = (small - large).sum(0).argsort(descending=True)
            left = small.sum(1, keepdim=True) - (small - large)[:, order].cumsum(1)  # by number of raised heads − 1
            enough = (left <= max_error**2).all(0).nonzero()
            if len(enough) == 0:
                continue
            raised = set(order[: int(enough[0]) + 1].tolist())
            split = PerHead(tuple(many if head in raised else few for head in range(len(order))))
            if best is None or visits(split) < visits(best):
                best = split
    return best


def _choose(call: Call, fits: list[Fit], fallback: bool, backend: str | None) -> tuple[Method, float, float | None]:
    """Method, error and speed-up of the first fit, or with `fallback` of the fastest one."""
    if not fallback:
        return (fits[0].method, fits[0].error, None) if fits else (Dense(), 0.0, None)
    chosen: tuple[Method, float, float | None] = (Dense(), 0.0, 1.0)
    fastest = 1 / FASTER
    for method, error in fits:
        speedup = timing(call, method, backend).speedup
        if speedup > fastest:
            chosen, fastest = (method, error, speedup), speedup
    return chosen


def _from_keys(call: Call, method: Method, backend: str | None) -> int:
    """The number of keys from which the method is faster than dense attention, found by halving the call."""
    while call.n_keys >= 2 * LEAST:
        half = call.first_half()
        if timing(half, method, backend).speedup * FASTER <= 1.0:
            break
        call = half
    return call.n_keys


def _tangent(share: float) -> Tangent:
    """`Tangent` with a share as its budget, which still means something at another length."""
    return Tangent(float(f"{share:.4g}"))
