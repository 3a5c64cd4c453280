"""Attention Biclustering, the problem that clusters solve approximately: its objective, and its optimum by search.

The feasible set C^L of the paper (eq. 2): every query and every key is in exactly one of L unordered clusters, each of
N / L queries and M / L keys; L divides both. Its size, which `n_biclusterings` computes, is

    N! / (C!^L) · M! / (S!^L) / L!

The objective (eq. 3) is ‖σ(P̂_0) − σ(P)‖_F, where P = Q Kᵀ and P̂_0 = Mask_0(P) keeps only pairs within a cluster. Row q
of σ(P̂_0) depends only on the *set* of keys in the cluster of q. So the squared objective is a sum over queries of
f_q(key set), and the problem is a table with a row per query and a column per set of M / L keys: `SetCosts`. The
paper's "max-mass" problem (Lemma 1, eq. 7) is the same with another table. `search` enumerates all biclusterings;
`smyrf.experiments.theory.solver` uses integer programming.

Neither several hashing rounds nor Tangent attention is in C^L: their queries see the keys of several clusters, or keys
that other clusters see too. Their maps can be closer to dense attention than the optimum; `against_optimum` reports
which maps are in C^L.

Shapes: N queries, M keys, D width, L clusters, C and S queries and keys per cluster, T sets of S keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import torch
from torch import Tensor

from smyrf.backends import find_backend
from smyrf.call import Call
from smyrf.grouping.group import group
from smyrf.grouping.groups import Groups
from smyrf.methods import Smyrf, Tangent
from smyrf.seeds import draw_seed

# Maximum number of biclusterings in `search`, and of entries in a table of costs.
MAX_BICLUSTERINGS = 10**8
MAX_COSTS = 10**7


@dataclass(frozen=True)
class Biclustering:
    """An element of C^L: the queries and keys of each cluster.

    Args:
        queries: ``(L, C)`` int64, each of 0 … N − 1 once.
        keys: ``(L, S)`` int64, each of 0 … M − 1 once.

    Example:
        >>> import torch
        >>> clusters = Biclustering(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1], [0]]))
        >>> clusters.together().int().T
        tensor([[0, 0, 1, 1],
                [1, 1, 0, 0]], dtype=torch.int32)
    """

    queries: Tensor
    keys: Tensor

    def __post_init__(self) -> None:
        for name in ("queries", "keys"):
            members = getattr(self, name)
            if members.dim() != 2 or members.numel() == 0:
                raise ValueError(f"{name} have the shape {tuple(members.shape)}, not (clusters, members)")
            if not torch.equal(members.flatten().sort().values, torch.arange(members.numel())):
                raise ValueError(f"{name}={members.tolist()} must have each of 0 … {members.numel() - 1} once")
        if len(self.queries) != len(self.keys):
            raise ValueError(f"there are {len(self.queries)} clusters of queries and {len(self.keys)} of keys")

    def together(self) -> Tensor:
        """Which pairs share a cluster, ``(N, M)`` bool."""
        pairs = torch.zeros(self.queries.numel(), self.keys.numel(), dtype=torch.bool)
        for queries, keys in zip(self.queries, self.keys, strict=True):
            pairs[queries[:, None], keys] = True
        return pairs


def mask(p: Tensor, together: Tensor, epsilon: float = 0.0) -> Tensor:
    """Apply Mask_ε: keep the scores of pairs that share a cluster, set the others to −a = log ε.

    Args:
        p: scores P, ``(N, M)``.
        together: ``(N, M)`` bool.

    Example:
        >>> import torch
        >>> mask(torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]]))
        tensor([[1., -inf]])
    """
    if not epsilon >= 0.0:
        raise ValueError(f"{epsilon=} must not be negative")
    return p.masked_fill(~together, math.log(epsilon) if epsilon > 0.0 else -math.inf)


def objective(p: Tensor, meetings: Tensor) -> float:
    """Compute ‖σ(P̂_0) − σ(P)‖_F (eq. 3).

    Args:
        p: scores P, ``(N, M)``.
        meetings: which pairs share a cluster (bool), or in how many rounds, ``(N, M)``. By eq. 15 a pair that meets in
            c hashing rounds has c times its weight. A query that meets no key has a row of zeros.

    Example:
        >>> import torch
        >>> p = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
        >>> objective(p, torch.ones(2, 2)), round(objective(p, torch.eye(2)), 4)
        (0.0, 0.2384)
    """
    p = p.double()
    approximate = (mask(p, meetings > 0) + meetings.double().clamp(min=1.0).log()).softmax(-1).nan_to_num(0.0)
    return float((approximate - p.softmax(-1)).norm())


@dataclass(frozen=True)
class SetCosts:
    """A biclustering problem: the cost of each query for each set of keys.

    Args:
        sets: ``(T, S)`` int64, all sets of S = M / L keys.
        costs: ``(N, T)`` float64. The cost of a biclustering is the sum over its queries.
        n_clusters: L.
    """

    sets: Tensor
    costs: Tensor
    n_clusters: int

    @property
    def n_queries(self) -> int:
        return len(self.costs)

    @property
    def n_keys(self) -> int:
        return self.n_clusters * self.sets.shape[1]

    def total(self, clusters: Biclustering) -> float:
        """Cost of a biclustering."""
        numbers = {tuple(keys): number for number, keys in enumerate(self.sets.tolist())}
        chosen = [numbers[tuple(sorted(keys))] for keys in clusters.keys.tolist()]
        return float(self.costs[clusters.queries, torch.tensor(chosen)[:, None]].sum())

    def row_bound(self) -> float:
        """Lower bound on the cost of biclusterings: the sum of every query's minimum."""
        return float(self.costs.min(1).values.sum())


def softmax_costs(p: Tensor, n_clusters: int) -> SetCosts:
    """Costs of Attention Biclustering, squared: f_q(keys) = ‖softmax of q's scores on these keys − σ(P)_q‖².

    Args:
        p: finite scores P, ``(N, M)``.

    Example:
        >>> import torch
        >>> p = torch.randn(4, 6)
        >>> problem = softmax_costs(p, 2)
        >>> best = search(problem)
        >>> abs(objective(p, best.clusters.together()) ** 2 - best.total) < 1e-12
        True
    """
    sets = _key_sets(p, n_clusters)
    dense = p.double().softmax(-1)  # (N, M)
    inside = dense[:, sets]  # (N, T, S)
    outside = dense.square().sum(-1, keepdim=True) - inside.square().sum(-1)  # (N, T)
    costs = outside + (p.double()[:, sets].softmax(-1) - inside).square().sum(-1)
    return SetCosts(sets, costs, n_clusters)


def mass_costs(weights: Tensor, n_clusters: int) -> SetCosts:
    """Costs of the max-mass problem of Lemma 1 (eq. 7), max Σ w over pairs that share a cluster: f_q(keys) = −Σ w.

    With w = (P + a)² (eq. 6) this is min ‖P̂_ε − P‖_F² up to a constant.

    Args:
        weights: finite weights w, ``(N, M)``.

    Example:
        >>> import torch
        >>> search(mass_costs(torch.tensor([[1.0, 5.0], [4.0, 5.0]]), 2)).total
        -9.0
    """
    sets = _key_sets(weights, n_clusters)
    return SetCosts(sets, -weights.double()[:, sets].sum(-1), n_clusters)


def _key_sets(p: Tensor, n_clusters: int) -> Tensor:
    """All sets of M / L keys, ``(T, S)``."""
    if p.dim() != 2:
        raise ValueError(f"scores have the shape {tuple(p.shape)}, not (queries, keys)")
    if not p.isfinite().all():
        raise ValueError("scores are not finite")
    n_queries, n_keys = p.shape
    _check_divides(n_queries, n_keys, n_clusters)
    size = n_keys // n_clusters
    if (n := n_queries * math.comb(n_keys, size)) > MAX_COSTS:
        raise ValueError(f"{n_queries=} and {n_keys=} in {n_clusters=} have {n:,} costs, more than {MAX_COSTS:,}")
    return torch.tensor(list(combinations(range(n_keys), size)))


def _check_divides(n_queries: int, n_keys: int, n_clusters: int) -> None:
    if n_clusters < 1 or n_queries < 1 or n_keys < 1 or n_queries % n_clusters or n_keys % n_clusters:
        raise ValueError(f"{n_clusters=} must divide {n_queries=} and {n_keys=}")


def n_biclusterings(n_queries: int, n_keys: int, n_clusters: int) -> int:
    """Compute |C^L|, the paper's T.

    Example:
        >>> n_biclusterings(4, 4, 2), n_biclusterings(16, 16, 4)
        (18, 165705915375000)
    """
    _check_divides(n_queries, n_keys, n_clusters)
    ways = [math.factorial(n) // math.factorial(n // n_clusters) ** n_clusters for n in (n_queries, n_keys)]
    return math.prod(ways) // math.factorial(n_clusters)


@dataclass(frozen=True)
class Optimum:
    """An optimal biclustering and its cost."""

    clusters: Biclustering
    total: float


def search(problem: SetCosts) -> Optimum:
    """Find the optimum by enumerating all biclusterings.

    Queries are partitioned without regard to order, each cluster around the first query that is left; key sets are then
    assigned to clusters in every order.

    Raises:
        ValueError: there are more than `MAX_BICLUSTERINGS`.

    Example:
        >>> import torch
        >>> best = search(softmax_costs(4.0 * torch.eye(4)[[2, 3, 0, 1]], 2))
        >>> best.clusters.keys[best.clusters.queries == 0]  # the key that shares a cluster with query 0
        tensor([2])
    """
    n_queries, n_keys, n_clusters = problem.n_queries, problem.n_keys, problem.n_clusters
    if (n := n_biclusterings(n_queries, n_keys, n_clusters)) > MAX_BICLUSTERINGS:
        raise ValueError(
            f"{n_queries=} and {n_keys=} in {n_clusters=} have {n:,} biclusterings, more than {MAX_BICLUSTERINGS:,}: "
            "use smyrf.experiments.theory.solver"
        )
    numbers = {keys: number for number, keys in enumerate(map(tuple, problem.sets.tolist()))}
    unordered = torch.tensor([[numbers[one] for one in parts] for parts in _partitions(n_keys, n_clusters)])  # (U, L)
    orders = torch.tensor(list(permutations(range(n_clusters))))  # (L!, L)
    dealt = unordered[:, orders].flatten(0, 1)  # (U·L!, L), numbers of sets
    found: tuple[float, tuple[tuple[int, ...], ...], Tensor] | None = None
    for parts in _partitions(n_queries, n_clusters):
        of_cluster = problem.costs[torch.tensor(parts)].sum(1)  # (L, T)
        totals = of_cluster.gather(1, dealt.T).sum(0)  # (U·L!,)
        best = int(totals.argmin())
        if found is None or float(totals[best]) < found[0]:
            found = float(totals[best]), parts, dealt[best]
    assert found is not None
    total, parts, chosen = found
    return Optimum(Biclustering(torch.tensor(parts), problem.sets[chosen]), total)


def _partitions(n: int, n_parts: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All partitions of 0 … n − 1 into parts of equal size, without regard to order.

    Example:
        >>> list(_partitions(4, 2))
        [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))]
    """

    def split(left: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if not left:
            yield ()
            return
        for others in combinations(left[1:], n // n_parts - 1):
            part = (left[0], *others)
            for rest in split(tuple(i for i in left if i not in part)):
                yield (part, *rest)

    return split(tuple(range(n)))


def meetings(lists: Sequence[Groups], n_queries: int, n_keys: int) -> Tensor:
    """Count how often each query meets each key in groups of one row, ``(N, M)`` int64, without far keys.

    Example:
        >>> import torch
        >>> halves = torch.arange(4).view(1, 2, 2)
        >>> meetings([Groups(halves, halves), Groups(halves, halves.flip(1))], 4, 4)[0]
        tensor([1, 1, 1, 1])
    """
    counts = torch.zeros(n_queries, n_keys, dtype=torch.int64)
    for groups in lists:
        for queries, keys in zip(groups.queries[0].long(), groups.keys[0].long(), strict=True):
            counts[queries[queries >= 0][:, None], keys[keys >= 0]] += 1
    return counts


@dataclass(frozen=True)
class Reached:
    """Objective of a method's map, and of the best biclustering with as many clusters.

    Args:
        value: ‖map − σ(P)‖_F.
        rounds: the same for each hashing round; one for Tangent.
        feasible: whether each round is an element of C^L.
        optimum: minimum over C^L.
    """

    method: Smyrf | Tangent
    value: float
    rounds: tuple[float, ...]
    feasible: bool
    optimum: float


def against_optimum(
    q: Tensor,
    k: Tensor,
    methods: Sequence[Smyrf | Tangent],
    n_clusters: int,
    *,
    scale: float = 1.0,
    seed: int = 0,
    solve: Callable[[SetCosts], Optimum] = search,
) -> list[Reached]:
    """Compare the objective of methods with L clusters to its optimum.

    Rounds of Smyrf are merged by eq. 15. The clusters of Tangent are those of its last level with their near keys only:
    far keys are not keys of the problem.

    Args:
        q: ``(N, D)``.
        k: ``(M, D)``.
        methods: methods that make L clusters for these sizes.
        scale: scale of the scores; 1 in the paper.
        solve: `search`, or `smyrf.experiments.theory.solver.solve`.

    Raises:
        ValueError: L does not divide N and M, or a method makes another number of clusters.

    Example:
        >>> import torch
        >>> from smyrf import Smyrf
        >>> q, k = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0)).double()
        >>> (one,) = against_optimum(q, k, [Smyrf(n_hashes=2, cluster_size=4)], 2)
        >>> one.feasible, min(one.rounds) >= one.optimum
        (True, True)
    """
    n_queries, n_keys = len(q), len(k)
    p = q.double() @ k.double().T * scale  # (N, M)
    problem = softmax_costs(p, n_clusters)
    grouped = []
    # All values are equally far from their mean, so that Tangent selects keys only by their scores.
    values = torch.eye(n_keys, dtype=q.dtype)
    for method in methods:
        call = Call(q[None, None], k[None, None], values[None, None], scale, seed=draw_seed(seed))
        lists = group(call, method, find_backend(None, q.device))
        if (made := lists[0].shape[1]) != n_clusters:
            raise ValueError(f"{method=} makes {made} clusters of {n_queries=} and {n_keys=}, not {n_clusters=}")
        grouped.append([meetings([one], n_queries, n_keys) for one in lists])
    optimum = objective(p, solve(problem).clusters.together())
    return [
        Reached(
            method,
            objective(p, torch.stack(rounds).sum(0)),
            tuple(objective(p, one) for one in rounds),
            all(_is_biclustering(one, n_clusters) for one in rounds),
            optimum,
        )
        for method, rounds in zip(methods, grouped, strict=True)
    ]


def _is_biclustering(counts: Tensor, n_clusters: int) -> bool:
    """Whether the counts are those of an element of C^L: any two queries share all of their M / L keys, or none."""
    n_queries, n_keys = counts.shape
    size = n_keys // n_clusters
    shared = counts @ counts.T  # (N, N)
    return bool(
        (counts.sum(1) == size).all()
        and (counts.sum(0) == n_queries // n_clusters).all()
        and ((shared == 0) | (shared == size)).all()
    )
