"""Reductions of 3-dimensional matching to Attention Biclustering: Theorem 1 of the paper.

Given X, Y, Z of n elements each and triples T ⊆ X × Y × Z: are there n triples that cover every element once? This is
NP-complete, so a polynomial reduction to "is there a biclustering of at most this cost?" makes Attention Biclustering
NP-hard. The paper's construction is not such a reduction; `by_triples` is.

**The paper's construction, `by_pairs` (Lemma 1).** It has a query and a key for each x, a key for each y and a query
for each z. A pair (x, y) or (y, z) has a weight if *some* triple contains it, so the triples themselves are lost: a
cluster (x, y, z) of full weight need not be in T. A matching does reach the threshold. But the threshold is reached if
and only if the graphs of the pairs (x, y) and of the pairs (y, z) have a perfect matching each, which is decidable in
polynomial time; T may still have no matching. The two conditions agree if T has every triple that its pairs allow
(`is_joined`), and these instances are easy. The bound on the best clustering holds for 0 < r_2 < r_1, also in cases
that the proof does not treat: clusters of two x or of two z lose more weight than they gain.

**The paper's step to the softmax, `with_special_keys` (Theorem 1).** Each query gets its own key with a score a that
grows, so that nearly all weight of a row of σ(P) is on that key. The proof neglects the change of that weight: with
w = e^P the squared objective tends to e^{−2a} times

    Σ_q [ Σ_{k outside} w_qk²  +  (Σ_{k outside} w_qk)² ],

over the keys outside q's cluster. The second term is the squared gain of the query's own key; it does not vanish
relative to the first for large a: the proof needs ε′ far below θ_2 ~ e^{−2a}, but has ε′ ~ e^{−a}. So the minimum is
not where Σ e^{2 q·k} is largest: the tests have a counterexample of two queries and four keys.

**A correct reduction, `by_triples`.** It uses the softmax objective directly, with clusters of 2 queries and 3 keys. So
Theorem 1 is true, and so is Lemma 1: weights 1 for allowed pairs, 2 for own keys and 0 for the rest give max-mass
problems by the same argument.

Shapes: N queries, M keys, L clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smyrf.experiments.theory.biclustering import Biclustering, SetCosts, mass_costs, softmax_costs

Triple = tuple[int, int, int]

# A score whose softmax weight is 0 in float64: the proof's −∞.
NEVER = -1000.0


@dataclass(frozen=True)
class Matching:
    """An instance of 3-dimensional matching: X, Y and Z are 0 … n − 1 each.

    Args:
        triples: (x, y, z), each once.

    Example:
        >>> instance = Matching(2, ((0, 0, 0), (0, 1, 1), (1, 0, 0)))  # the paper's example
        >>> instance.solve()
        ((0, 1, 1), (1, 0, 0))
    """

    n: int
    triples: tuple[Triple, ...]

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n={self.n} must be at least 1")
        for triple in self.triples:
            if len(triple) != 3 or not all(0 <= i < self.n for i in triple):
                raise ValueError(f"{triple=} must have three numbers of 0 … {self.n - 1}")
        if len(set(self.triples)) < len(self.triples):
            raise ValueError(f"triples={self.triples} must differ")

    def solve(self) -> tuple[Triple, ...] | None:
        """Find n triples that cover each element once by backtracking; None if there are none."""

        def extend(found: tuple[Triple, ...]) -> tuple[Triple, ...] | None:
            if len(found) == self.n:
                return found
            for triple in self.triples:
                if triple[0] == len(found) and all(triple[1] != y and triple[2] != z for _, y, z in found):
                    whole = extend((*found, triple))
                    if whole is not None:
                        return whole
            return None

        return extend(())

    def is_matching(self, triples: Sequence[Triple]) -> bool:
        """Whether the triples are n of the instance's and cover each element once."""
        whole = set(range(self.n))
        return (
            len(triples) == self.n
            and set(triples) <= set(self.triples)
            and all({triple[axis] for triple in triples} == whole for axis in range(3))
        )

    def is_joined(self) -> bool:
        """Whether (x, y, z) is a triple whenever (x, y) and (y, z) are parts of triples.

        Example:
            >>> Matching(2, ((0, 0, 1), (1, 0, 0))).is_joined()  # (0, 0) and (0, 0) are there, (0, 0, 0) is not
            False
        """
        return all((x, y, w) in self.triples for x, y, _ in self.triples for _, v, w in self.triples if v == y)


def draw(n: int, n_triples: int, seed: int) -> Matching:
    """Draw a random instance, with or without a matching.

    Example:
        >>> len(draw(3, 5, seed=0).triples)
        5
    """
    if not 0 <= n_triples <= n**3:
        raise ValueError(f"{n_triples=} must be at most {n=} to the third")
    numbers = torch.randperm(n**3, generator=torch.Generator().manual_seed(seed))[:n_triples].sort().values
    return Matching(n, tuple((i // n**2, i // n % n, i % n) for i in numbers.tolist()))


@dataclass(frozen=True)
class Reduction:
    """A biclustering problem that encodes an instance of 3-dimensional matching.

    Args:
        scores: ``(N, M)`` float64: scores P, or weights of a max-mass problem. Any matrix is a product of queries and
            keys, for example Q = P and K = I.
        problem: costs of the biclustering problem.
        threshold: reached by some biclustering if there is a matching, and for `by_triples` only then.
    """

    instance: Matching
    scores: Tensor
    problem: SetCosts
    threshold: float

    def is_reached(self, total: float) -> bool:
        """Whether a cost is at most the threshold, up to rounding."""
        return total <= self.threshold + 1e-9


def by_pairs(instance: Matching, r1: float = 4.0, r2: float = 1.0) -> Reduction:
    """The paper's construction (Lemma 1): a max-mass problem with n clusters of 2 queries and 2 keys.

    Queries are X, then Z; keys are X, then Y. A key x has weight r_1 for its own query; a key y has weight r_1 for a
    query x and r_2 for a query z with which it is in some triple. The threshold on the mass is n (2 r_1 + r_2).
    **It loses the triples**: see the module's docstring.

    Args:
        r1, r2: 0 < r_2 < r_1.

    Example:
        >>> from smyrf.experiments.theory.biclustering import search
        >>> instance = Matching(2, ((0, 0, 1), (1, 0, 0), (1, 1, 1)))
        >>> reduction = by_pairs(instance)
        >>> instance.solve(), reduction.is_reached(search(reduction.problem).total)  # reached, but no matching
        (None, True)
    """
    if not 0.0 < r2 < r1:
        raise ValueError(f"{r1=} and {r2=} must be positive, and r2 must be less than r1")
    n = instance.n
    weights = torch.zeros(2 * n, 2 * n, dtype=torch.float64)
    weights[:n, :n] = r1 * torch.eye(n)
    for x, y, z in instance.triples:
        weights[x, n + y] = r1
        weights[n + z, n + y] = r2
    return Reduction(instance, weights, mass_costs(weights, n), -n * (2 * r1 + r2))


def clusters_by_pairs(instance: Matching, matching: Sequence[Triple]) -> Biclustering:
    """The clusters of `by_pairs` for a matching: queries x and z with keys x and y."""
    n = instance.n
    return Biclustering(
        torch.tensor([(x, n + z) for x, _, z in matching]), torch.tensor([(x, n + y) for x, y, _ in matching])
    )


def with_special_keys(p: Tensor, a: float) -> Tensor:
    """Add a key for each query, with score a for that query and −∞ for all others: ``(N, M + N)``.

    The second step of the paper's proof. If a is large enough, each cluster holds the special keys of its queries. The
    module's docstring gives the limit of the objective, which is not the proof's.

    Example:
        >>> import torch
        >>> with_special_keys(torch.zeros(2, 1), 5.0)
        tensor([[    0.,     5., -1000.],
                [    0., -1000.,     5.]])
    """
    special = torch.full((len(p), len(p)), NEVER, dtype=p.dtype).fill_diagonal_(a)
    return torch.cat([p, special], dim=1)


def by_triples(instance: Matching) -> Reduction:
    """Reduce matching to Attention Biclustering with softmax scores: t = |T| clusters of 2 queries and 3 keys.

    Queries: one per triple; a *chooser* per x, and t − n spare choosers. Keys: an own key per chooser; one per y and
    per z; 2 (t − n) spare keys. Scores: 0 for *allowed* pairs, log 4t for a chooser and its own key, −∞ for all others.
    Allowed are

    - a triple with the own key of its x's chooser, with its y and its z, with all spare keys and own keys of spare
      choosers;
    - the chooser of an x with every y and z; a spare chooser with every spare key.

    The threshold on the squared objective is the sum of the minimum costs of all queries. It is reached if and only if
    there is a matching:

    1. A triple's query has weight 1 / d on each of d allowed keys. If its cluster has m ≥ 1 of them, it costs 1 / m −
       1 / d; if none, 1 / 3 + 1 / d. So its cost is minimal if and only if its three keys are allowed.
    2. A chooser has more than half of its weight on its own key. With p its weights, and m and s the sums of p and of
       p² over its cluster, it costs Σ p² − s (2m − 1) / m²: more than Σ p² without the own key, and with it less the
       larger s and m are. So its cost is minimal if and only if it has its own key and two allowed ones.
    3. If all costs are minimal, no two choosers share a cluster, for the own key of one is not allowed to the other. So
       each cluster has one chooser and one triple. The chooser of x has its own key, so the triple contains x, and two
       keys that are allowed to both: this triple's y and z. These n triples are a matching.
    4. From a matching, `clusters_by_triples` makes clusters in which all pairs are allowed.

    The reduction is polynomial: 2t queries, 3t keys, and any score low enough for 1 and 2 in place of −∞ (here −1000).

    Raises:
        ValueError: there are fewer than n triples, so that no matching can exist.

    Example:
        >>> from smyrf.experiments.theory.biclustering import search
        >>> for last in (1, 0):
        ...     instance = Matching(2, ((0, 0, 1), (1, 0, 0), (1, 1, last)))
        ...     reduction = by_triples(instance)
        ...     print(instance.solve(), reduction.is_reached(search(reduction.problem).total))
        None False
        ((0, 0, 1), (1, 1, 0)) True
    """
    n, t = instance.n, len(instance.triples)
    if t < n:
        raise ValueError(f"triples={instance.triples} are fewer than n={n}: no matching can exist")
    own_weight = 4 * t
    # Queries: triples, choosers. Keys: own keys, Y, Z, spare ones.
    scores = torch.full((2 * t, 3 * t), NEVER, dtype=torch.float64)
    triples, choosers = scores[:t], scores[t:]
    for row, (x, y, z) in zip(triples, instance.triples, strict=True):
        row[[x, t + y, t + n + z]] = 0.0
    triples[:, n:t] = 0.0
    triples[:, t + 2 * n :] = 0.0
    choosers[:n, t : t + 2 * n] = 0.0
    choosers[n:, t + 2 * n :] = 0.0
    choosers[:, :t].fill_diagonal_(math.log(own_weight))
    threshold = t * (1 / 3 - 1 / (3 + 3 * (t - n)))
    for count, others in ((n, 2 * n), (t - n, 2 * (t - n))):  # choosers, and allowed keys of each besides its own
        inside, dense = own_weight + 2, own_weight + others  # denominators
        gain = 1 / inside - 1 / dense
        threshold += count * ((own_weight * gain) ** 2 + 2 * gain**2 + (others - 2) / dense**2)
    return Reduction(instance, scores, softmax_costs(scores, t), threshold)


def clusters_by_triples(instance: Matching, matching: Sequence[Triple]) -> Biclustering:
    """The clusters of `by_triples` for a matching; triples outside it go to spare choosers."""
    n, t = instance.n, len(instance.triples)
    queries, keys = [], []
    spare = 0
    for number, triple in enumerate(instance.triples):
        if triple in matching:
            x, y, z = triple
            queries.append((number, t + x))
            keys.append((x, t + y, t + n + z))
        else:
            queries.append((number, t + n + spare))
            keys.append((n + spare, t + 2 * n + 2 * spare, t + 2 * n + 2 * spare + 1))
            spare += 1
    return Biclustering(torch.tensor(queries), torch.tensor(keys))


def chosen_triples(instance: Matching, clusters: Biclustering) -> tuple[Triple, ...]:
    """Triples that share a cluster of `by_triples` with the chooser of an x: a matching if the threshold is reached."""
    n, t = instance.n, len(instance.triples)
    choosers = range(t, t + n)
    return tuple(
        instance.triples[first]
        for first, second in clusters.queries.sort(dim=1).values.tolist()
        if first < t and second in choosers
    )
