"""Everything that is compared at a budget of key visits per query: our methods, and peers from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from smyrf.attention import attention
from smyrf.methods import Method, Smyrf, Tangent
from smyrf.tools.quality.peers import PeerError, PeersOf, Run

CLUSTER_SIZES = (16, 32, 64)
ABLATION_SIZE = 32
# A smaller budget is less than one round of the smallest clusters.
LEAST_BUDGET = min(CLUSTER_SIZES)


@dataclass(frozen=True)
class Entrant:
    """A method at a budget.

    Args:
        family: the method without its sizes; one curve in a plot.
        label: the method with its sizes.
        ours: whether it is in this package.
        key_visits: actual key visits per query.
        settings: its parameters, for the result file.
    """

    family: str
    label: str
    ours: bool
    budget: int
    key_visits: float
    run: Run
    settings: dict[str, Any]


def all_entrants(budgets: Sequence[int], n_keys: int, n_queries: int, peers: PeersOf | None) -> list[Entrant]:
    """Everything that is compared, budget by budget, ours first.

    Example:
        >>> [one.label for one in all_entrants([16], 512, 512, None)][:2]
        ['Smyrf 1×16', 'Smyrf 1×16, E2LSH']
    """
    found = []
    for budget in budgets:
        found += [_ours(method, budget, n_keys, n_queries) for method in methods(budget)]
        if peers is not None:
            found += _theirs(peers, budget, n_keys, n_queries)
    return found


def methods(budget: int) -> list[Method]:
    """Our methods at a budget: Smyrf with several rounds × cluster sizes, deduplicated, and its ablations; Tangent.

    Example:
        >>> [method.label for method in methods(32)][:4]
        ['Smyrf 2×16', 'Smyrf 1×32', 'Smyrf 2×16, pairs once', 'Smyrf 1×32, E2LSH']
    """
    smyrf = [Smyrf(budget // size, size) for size in CLUSTER_SIZES if size <= budget]
    size = min(ABLATION_SIZE, budget)
    middle = Smyrf(budget // size, size)
    return [
        *smyrf,
        *(replace(method, deduplicate=True) for method in smyrf if method.n_hashes > 1),
        *(replace(middle, transform=name) for name in ("none", "xbox", "h2lsh", "l2lsh")),
        replace(middle, hashing="cross_polytope"),
        Tangent(budget, levels=1),
        Tangent(budget, levels=2),
    ]


def _ours(method: Method, budget: int, n_keys: int, n_queries: int) -> Entrant:
    def run(q: Tensor, k: Tensor, v: Tensor, scale: float, seed: int) -> Tensor:
        return attention(q, k, v, method=method, scale=scale, generator=seed)

    visits = method.key_visits(n_keys, n_queries)
    return Entrant(method.family, method.label, True, budget, visits, run, method.to_dict())


def _theirs(peers: PeersOf, budget: int, n_keys: int, n_queries: int) -> list[Entrant]:
    try:
        return [
            Entrant(name, name, False, budget, peer.key_visits, peer.run, peer.settings)
            for name, peer in peers(budget, n_keys, n_queries).items()
        ]
    except Exception as error:  # foreign code may raise anything
        raise PeerError(f"peers({budget}, {n_keys}, {n_queries}) failed: {type(error).__name__}: {error}") from error
