"""`tune`: the cheapest method and size for each layer of a model that keep its error below a target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smyrf.methods import Dense, Method, PerHead, Tangent, check_method
from smyrf.call import Call
from smyrf.models.calls import given_calls, model_calls
from smyrf.models.plan import LayerPlan, Plan
from smyrf.seeds import SEED_LIMIT
from smyrf.tuning.estimate import Sample, relative
from smyrf.tuning.timing import machine, timing

# Key visits of the smallest budget that is tried, and the share of the keys from which on nothing is saved.
LEAST, MOST = 32, 0.9
# Budgets are found to this factor.
PRECISION = 1.05
# A method is taken if it needs at most this share of dense attention's time; the rest is noise.
FASTER = 0.95
# A larger budget may be faster than a small one, but by no more than this.
SPREAD = 0.75
# Further budgets to choose two from, as multiples of the best.
AROUND = (0.5, 0.7, 1.4, 2.0)
# Two budgets for the heads of a layer are taken if they need at most this share of one budget's key visits.
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
) -> Plan:
    """Chooses for each attention call the cheapest method that keeps its relative output error below a target.

    The error ‖output − dense‖ / ‖dense‖ is estimated on a sample of rows, of which dense attention is computed,
    in the worst of a few documents. Without `candidates` the budget of `Tangent` is found by bisection, and
    two budgets are given to the heads of a layer where that saves a tenth of the key visits or more.

    Args:
        model_or_qkv: a model, whose calls of ``F.scaled_dot_product_attention`` are captured, or the inputs of
            such calls: one (q, k, v), or a sequence of (q, k, v) or (q, k, v, scale).
        batch: what the model is run on: a mapping of keyword arguments, a tuple or list of arguments, or
            the only argument.
        max_error: the target, for each layer.
        candidates: methods to choose from, instead.
        fallback: leave dense attention where it is as fast on this machine (measured, and cached), and
            choose by time. Without it the choice is by key visits alone.
        documents: rows of the batch that errors are estimated on, at most.
        rows: queries in the sample of a document.
        seed: of the sample, and of methods with random clusters.

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
    if not isinstance(fallback, bool):
        raise TypeError(f"{fallback=} must be a bool")

    if isinstance(model_or_qkv, nn.Module):
        if batch is None:
            raise ValueError("batch=None: a model needs a batch to be run on")
        calls = model_calls(model_or_qkv, batch)
    elif isinstance(model_or_qkv, Sequence):
        if batch is not None:
            raise ValueError("batch must be left out where q, k and v are given")
        calls = given_calls(model_or_qkv)
    else:
        raise TypeError(
            f"model_or_qkv must be a torch.nn.Module or a sequence of (q, k, v), not {type(model_or_qkv).__name__}"
        )
    layers = plan_layers(
        calls, max_error, candidates=candidates, fallback=fallback, documents=documents, rows=rows, seed=seed
    )
    return Plan(tuple(layers), float(max_error), machine() if fallback else "")


def check_target(max_error: object) -> None:
    """Raises unless `max_error` is a number between 0 and 1."""
    if not isinstance(max_error, int | float) or isinstance(max_error, bool):
        raise TypeError(f"{max_error=} must be a number")
    if not 0.0 < max_error < 1.0:
        raise ValueError(f"{max_error=} must be between 0 and 1")


def check_counts(**counts: object) -> None:
    """Raises unless each is an int from 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be an int")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def check_seed(seed: object) -> None:
    """Raises unless `seed` is an int that leaves room for further seeds behind it."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"{seed=} must be an int")
    if not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"{seed=} must be in [0, 2**62)")


def plan_layers(
    calls: Sequence[Call],
    max_error: float,
    *,
    candidates: Sequence[Method] | None = None,
    fallback: bool = True,
    documents: int = 4,
    rows: int = 256,
    seed: int = 0,
) -> Iterator[LayerPlan]:
    """The choices of `tune`, one after the other, so that a bar can move."""
    for index, call in enumerate(calls):
        n_documents = min(documents, len(call.q))
        call = call.take([i * len(call.q) // n_documents for i in range(n_documents)])
        fits: list[Fit] = []
        reason = call.only_dense
        if not reason:
            if candidates is None:
                fits, reason = _bisected(call, max_error, rows, seed, fallback)
            else:
                fits, reason = _listed(call, candidates, max_error, rows, seed)
        method, error, speedup = _choose(call, fits, fallback)
        if fits and isinstance(method, Dense):
            reason = AS_FAST
        from_keys = _from_keys(call, method) if fallback and not isinstance(method, Dense) else 0
        yield LayerPlan(
            index, method, call.key_visits(method), call.n_keys, error, speedup, reason, call.name, from_keys
        )


class Fit(NamedTuple):
    """A method that is within the error, with its error."""

    method: Method
    error: float


class Trials:
    """Errors of methods on some documents, each method run once.

    Args:
        call: the documents.
        rows: queries in the sample of each.

    Example:
        >>> x = torch.randn(2, 3, 100, 8)
        >>> Trials(Call(x, x, x, 0.3), rows=10, seed=0).square_errors(Tangent(50)).shape
        torch.Size([2, 3])
    """

    def __init__(self, call: Call, rows: int, seed: int) -> None:
        self.samples = [Sample(call.take([i]), rows, seed + i) for i in range(len(call.q))]
        self.squares = torch.stack([sample.squares for sample in self.samples])  # (documents, heads)
        self.key_visits = call.key_visits
        self.found: dict[Method, Tensor] = {}

    def square_errors(self, method: Method) -> Tensor:
        """``(documents, heads)``."""
        if method not in self.found:
            self.found[method] = torch.stack([sample.square_errors(method) for sample in self.samples])
        return self.found[method]

    def worst(self, square_errors: Tensor) -> float:
        """Relative error of the document where it is greatest; NaN if there is one."""
        errors = torch.tensor([relative(*pair) for pair in zip(square_errors, self.squares, strict=True)])
        return float(errors.max())

    def error(self, method: Method) -> float:
        """Relative error of a method on its worst document."""
        return self.worst(self.square_errors(method))


def _listed(call: Call, candidates: Sequence[Method], max_error: float, rows: int, seed: int) -> tuple[list[Fit], str]:
    """Those of the candidates that are within the error, cheapest first, and a reason."""
    trials = Trials(call, rows, seed)
    fits = [Fit(method, error) for method in candidates if (error := trials.error(method)) <= max_error]
    fits.sort(key=lambda fit: trials.key_visits(fit.method))
    return fits, CHEAPEST if fits else NONE_FITS


def _bisected(call: Call, max_error: float, rows: int, seed: int, fallback: bool) -> tuple[list[Fit], str]:
    """Two budgets for the heads where that saves enough, the smallest budget for all heads, and a reason.

    With `fallback` the search ends as soon as a budget that is too small is slower than dense attention.
    """
    n_queries, n_keys = call.n_queries, call.n_keys
    least = LEAST / n_keys
    if least > MOST or _tangent(least).is_exact(n_queries, n_keys):
        return [], TOO_SHORT
    if fallback and timing(call, _tangent(least)).speedup < SPREAD:
        return [], AS_FAST
    trials = Trials(call, rows, seed)
    low, high = least, least if trials.error(_tangent(least)) <= max_error else 1.0
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        if trials.error(_tangent(middle)) <= max_error:
            high = middle
            continue
        low = middle
        if fallback and timing(call, _tangent(low)).speedup < SPREAD:
            return [], AS_FAST
    one = _tangent(high)
    if high > MOST or one.is_exact(n_queries, n_keys):
        return [], NONE_FITS
    fits = [Fit(one, trials.error(one))]
    for factor in AROUND:
        if least <= factor * high <= MOST:
            trials.error(_tangent(factor * high))
    two = _split(trials, max_error)
    if two is not None and trials.key_visits(two) <= WORTH_SPLITTING * trials.key_visits(one):
        by_head = [trials.square_errors(method)[:, head] for head, method in enumerate(two.methods)]
        fits.insert(0, Fit(two, trials.worst(torch.stack(by_head, dim=1))))
    return fits, CHEAPEST


def _split(trials: Trials, max_error: float) -> PerHead | None:
    """The cheapest two of the budgets that were tried: heads get the larger one while it helps most.

    A head does not depend on the others, so the error of every split is known from what was run.
    """
    tried = [method for method in trials.found if isinstance(method, Tangent)]
    tried.sort(key=trials.key_visits)
    totals = trials.squares.sum(1, keepdim=True)  # (documents, 1)
    best: PerHead | None = None
    for i, few in enumerate(tried):
        for many in tried[i + 1 :]:
            small, large = (trials.found[method] / totals for method in (few, many))  # (documents, heads)
            order = (small - large).sum(0).argsort(descending=True)
            left = small.sum(1, keepdim=True) - (small - large)[:, order].cumsum(1)  # after so many heads and one
            enough = (left <= max_error**2).all(0).nonzero()
            if len(enough) == 0:
                continue
            raised = set(order[: int(enough[0]) + 1].tolist())
            split = PerHead(tuple(many if head in raised else few for head in range(len(order))))
            if best is None or trials.key_visits(split) < trials.key_visits(best):
                best = split
    return best


def _choose(call: Call, fits: list[Fit], fallback: bool) -> tuple[Method, float, float | None]:
    """Method, error and speed-up of the first that fits, or of the fastest if time counts."""
    if not fallback:
        return (fits[0].method, fits[0].error, None) if fits else (Dense(), 0.0, None)
    chosen: tuple[Method, float, float | None] = (Dense(), 0.0, 1.0)
    fastest = 1 / FASTER
    for method, error in fits:
        speedup = timing(call, method).speedup
        if speedup > fastest:
            chosen, fastest = (method, error, speedup), speedup
    return chosen


def _from_keys(call: Call, method: Method) -> int:
    """With how many keys the method is faster than dense attention, found by halving the call."""
    while call.n_keys >= 2 * LEAST:
        half = call.first_half()
        if timing(half, method).speedup * FASTER <= 1.0:
            break
        call = half
    return call.n_keys


def _tangent(share: float) -> Tangent:
    """A share rather than a number of key visits: it still means something at another length."""
    return Tangent(float(f"{share:.4g}"))
