"""Inspection of each head of a model: its attention map, and how well methods approximate it.

Shapes: N queries, M keys, E value width, R inspected rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

import torch

from smyrf.call import Call
from smyrf.methods import Dense, Method, PerHead, check_method
from smyrf.tools.analysis.cluster_sizes import Balance, balance
from smyrf.tools.analysis.head_profile import HeadProfile, ProfileSums
from smyrf.tools.analysis.maps import head_vectors, map_blocks
from smyrf.tools.analysis.sparsity import entropy, share_below, share_below_uniform
from smyrf.tools.analysis.spectrum import Spectrum, spectrum
from smyrf.tools.analysis.visited_keys import VisitedKeys, best_mass, captured_mass


@dataclass(frozen=True)
class Outcome:
    """How well a method approximates one head.

    Args:
        key_visits: per query; in causal attention averaged over queries.
        share: key visits relative to dense attention.
        distinct_keys: mean number of distinct keys that a query visits.
        captured: softmax mass of these, averaged over queries.
        best: softmax mass of the `key_visits` heaviest keys of each query, an upper bound for that number of keys. In
            causal attention queries visit different numbers of keys, and the bound is for the number of each.
        error: ‖output − dense‖ / ‖dense‖ over the rows.
        balance: of its clusters, in the first document.
    """

    method: Method
    key_visits: int
    share: float
    distinct_keys: float
    captured: float
    best: float
    error: float
    balance: Balance

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "label": self.method.label, "method": self.method.to_dict()}


@dataclass(frozen=True)
class HeadInspection:
    """One head of one layer, over all documents.

    Args:
        layer: number of the attention call in the model, from 0.
        name: of the module that makes the call; "" if it is not known.
        n_rows: inspected queries, in all documents.
        below_small: share of the keys with a weight below 0.01, as the paper counts.
        below_uniform: share of the keys with a weight below 1/M.
        entropy: of a query's weights in nats, averaged over queries.
        entropy_share: the same relative to its maximum, the logarithm of the number of keys.
        profile: see `HeadProfile`; "character" in JSON.
        spectrum: of the first document's map; None if it was not asked for.
        outcomes: one for each method, in order.
    """

    layer: int
    name: str
    head: int
    n_queries: int
    n_keys: int
    n_rows: int
    below_small: float
    below_uniform: float
    entropy: float
    entropy_share: float
    profile: HeadProfile
    spectrum: Spectrum | None
    outcomes: tuple[Outcome, ...]

    @property
    def effective_rank(self) -> float:
        """Effective rank of the spectrum; NaN without a spectrum."""
        return math.nan if self.spectrum is None else self.spectrum.effective_rank

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        found: dict[str, Any] = asdict(self) | {"outcomes": [one.as_dict() for one in self.outcomes]}
        found["character"] = found.pop("profile")
        if self.spectrum is not None:
            found["spectrum"] |= {"effective_rank": self.spectrum.effective_rank, "rank": self.spectrum.rank()}
        return found


def inspect_heads(
    calls: Sequence[Call],
    methods: Sequence[Method],
    *,
    layers: Sequence[int] | None = None,
    rows: int = 1024,
    n_values: int = 64,
    seed: int = 0,
) -> Iterator[HeadInspection]:
    """Inspect every head of attention calls, one after the other.

    Methods run on all queries, since all of them determine the clusters; the map is inspected in a sample of its rows,
    a block at a time. Singular values use all rows. Calls that only dense attention can serve are skipped.

    Args:
        calls: from `smyrf.models.calls.model_calls`; layers are numbered by their order.
        methods: to approximate each head with; any except `PerHead`.
        layers: numbers of the calls to inspect; all by default.
        rows: R, inspected queries per document.
        n_values: singular values of a map longer than `spectrum.SHORT`; 0 for no singular values at all.
        seed: of the sample of rows, and of random methods.

    Raises:
        ValueError: names the wrong argument, or says why there is nothing to inspect.

    Example:
        >>> from smyrf import Tangent
        >>> x = torch.randn(1, 2, 300, 8)
        >>> first, second = inspect_heads([Call(x, x, x, 0.35)], [Tangent(0.25)])
        >>> (second.layer, second.head, second.n_rows), second.outcomes[0].captured <= second.outcomes[0].best
        ((0, 1, 300), True)
    """
    for name, value, least in (("rows", rows, 1), ("n_values", n_values, 0)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    for method in methods:
        check_method(method)
        if method.kind == PerHead.kind:
            raise ValueError(f"methods: {method.label} is for several heads, and each head is inspected by itself")
    chosen = list(range(len(calls)) if layers is None else layers)
    for layer in chosen:
        if not 0 <= layer < len(calls):
            raise ValueError(f"{layer=} must be from 0 to {len(calls) - 1}")
    if chosen and all(calls[layer].only_dense for layer in chosen):
        raise ValueError(f"calls: only dense attention can serve any of them: {calls[chosen[0]].only_dense}")
    return (
        _inspect(calls[layer], layer, head, methods, rows, n_values, seed)
        for layer in chosen
        for head in range(0 if calls[layer].only_dense else calls[layer].q.shape[1])
    )


def _inspect(
    call: Call, layer: int, head: int, methods: Sequence[Method], rows: int, n_values: int, seed: int
) -> HeadInspection:
    documents = [_document(call, i, head, methods, rows, seed) for i in range(len(call.q))]
    n_rows = [found.n_rows for found in documents]

    def mean(values: Sequence[float]) -> float:
        return sum(n * value for n, value in zip(n_rows, values, strict=True)) / sum(n_rows)

    square = sum(found.profile.output_square for found in documents)
    outcomes = []
    for i, method in enumerate(methods):
        its = [found.outcomes[i] for found in documents]
        square_error = sum(one.error**2 * of.profile.output_square for one, of in zip(its, documents, strict=True))
        outcomes.append(
            Outcome(
                method=method,
                key_visits=its[0].key_visits,
                share=its[0].share,
                distinct_keys=mean([one.distinct_keys for one in its]),
                captured=mean([one.captured for one in its]),
                best=mean([one.best for one in its]),
                error=(square_error / square) ** 0.5 if square else 0.0,
                balance=its[0].balance,
            )
        )
    profiles = [asdict(found.profile) for found in documents]
    means = {field.name: fmean(one[field.name] for one in profiles) for field in fields(HeadProfile)}
    return HeadInspection(
        layer=layer,
        name=call.name,
        head=head,
        n_queries=call.n_queries,
        n_keys=call.n_keys,
        n_rows=sum(n_rows),
        below_small=mean([found.below_small for found in documents]),
        below_uniform=mean([found.below_uniform for found in documents]),
        entropy=mean([found.entropy for found in documents]),
        entropy_share=mean([found.entropy_share for found in documents]),
        profile=HeadProfile(**means | {"output_square": square}),
        spectrum=spectrum(call.head(0, head), n_values, seed) if n_values else None,
        outcomes=tuple(outcomes),
    )


def _document(call: Call, document: int, head: int, methods: Sequence[Method], rows: int, seed: int) -> HeadInspection:
    """Inspection of one document, without singular values."""
    one = call.head(document, head)
    if not all(bool(x.isfinite().all()) for x in head_vectors(one)):
        raise ValueError(f"{call.name or 'a layer'} has numbers that are not finite in q, k or v of head {head}")
    chosen = one.sample_rows(rows, seed)  # (R,)
    visits = [one.key_visits(method) for method in methods]
    visited = [VisitedKeys(one, method, seed) for method in methods]
    sums = ProfileSums(one)
    maps = torch.zeros(4, dtype=torch.float64)  # below_small, below_uniform, entropy, entropy_share
    found = torch.zeros(len(methods), 4, dtype=torch.float64)  # distinct keys, captured, best, ‖output − dense‖²
    meetings = torch.zeros(len(methods), one.n_keys)  # number of queries that visit each key
    for block in map_blocks(one, chosen):
        if not bool(block.weights.isfinite().all()):
            raise ValueError(f"{call.name or 'a layer'} has scores that are not finite in head {head}")
        output = sums.add(block)  # (R, E)
        nats = entropy(block)
        of_most = nats / block.n_seen.clamp(min=2.0).log()  # a single key has entropy 0 of 0
        maps += torch.stack([x.double().sum() for x in (share_below(block), share_below_uniform(block), nats, of_most)])
        for i, (its, n) in enumerate(zip(visited, visits, strict=True)):
            met = its.keys(block.rows)  # (R, M)
            meetings[i] += met.sum(0)
            counts = met.sum(1) if one.is_causal else torch.full((len(met),), n)  # (R,)
            heaviest = best_mass(block, counts[:, None]).double().sum()
            error = (its.output[block.rows].double() - output.double()).square().sum()
            captured = captured_mass(block, met).double().sum()
            found[i] += torch.stack([met.sum().double(), captured, heaviest, error])
    profile = sums.profile()
    below_small, below_uniform, nats_mean, share = (maps / len(chosen)).tolist()
    dense = one.key_visits(Dense())
    outcomes = []
    for method, its, n_visits, met_by, (distinct, captured, best, error) in zip(
        methods, visited, visits, meetings, found.tolist(), strict=True
    ):
        outcomes.append(
            Outcome(
                method=method,
                key_visits=n_visits,
                share=n_visits / dense,
                distinct_keys=distinct / len(chosen),
                captured=captured / len(chosen),
                best=best / len(chosen),
                error=(error / profile.output_square) ** 0.5 if profile.output_square else 0.0,
                balance=balance(its.lists, one.n_keys, float(met_by.max()) / len(chosen)),
            )
        )
    return HeadInspection(
        layer=0,
        name="",
        head=head,
        n_queries=one.n_queries,
        n_keys=one.n_keys,
        n_rows=len(chosen),
        below_small=below_small,
        below_uniform=below_uniform,
        entropy=nats_mean,
        entropy_share=share,
        profile=profile,
        spectrum=None,
        outcomes=tuple(outcomes),
    )
