"""Three-dimensional matching as Attention Biclustering: Theorem 1 of the paper, built and checked.

Given X, Y, Z of n elements each and triples T ⊆ X × Y × Z: are there n triples that cover every element once? This is
NP-complete, so a polynomial construction that turns it into "is there a biclustering of at most this cost?" makes
Attention Biclustering NP-hard. The paper's construction does not do so; `by_triples` does.

**The paper's construction, `by_pairs` (Lemma 1).** It has a query and a key for each x, a key for each y and a query
for each z. A pair (x, y) or (y, z) is worth something if *some* triple has it, so the triples themselves are lost: a
cluster (x, y, z) of full worth need not be in T. A matching does reach the threshold. The threshold is reached if and
only if the graph of the pairs (x, y) and that of the pairs (y, z) have a perfect matching each, which is decided in
polynomial time; T may still have no matching. The two agree where T has every triple that its pairs allow
(`is_joined`), and these are easy instances. The bound on the best clustering is right for 0 < r_2 < r_1, beyond the
cases that the proof looks at: clusters of two x or of two z cost more than they bring.

**The paper's way from there to the softmax, `with_special_keys` (Theorem 1).** Each query gets a key of its own with a
score a that grows, so that a row of σ(P) is nearly all on that key. The proof neglects what remains there: with w =
e^P the squared objective tends to e^{−2a} times

    Σ_q [ Σ_{k outside} w_qk²  +  (Σ_{k outside} w_qk)² ],

over the keys outside of q's cluster. The second term is the square of what the own key gains, and stays beside the
first however large a is: the proof asks for an ε′ far below θ_2 ~ e^{−2a}, and has ε′ ~ e^{−a}. So the minimum is not
where Σ e^{2 q·k} is largest: the tests have two queries and four keys for which they differ.

**A construction that holds, `by_triples`.** It goes to the softmax objective in one step, with clusters of 2 queries
and 3 keys. So the theorem stands, and Lemma 1 too: weights 1 for what is allowed, 2 for own keys and 0 for the rest
give max-mass problems by the same argument.

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

# A score whose weight is zero in float64 beside any other: the proof's −∞.
NEVER = -1000.0


@dataclass(frozen=True)
class Matching:
    """An instance of 3-dimensional matching: X, Y and Z are 0 … n − 1 each.

    Args:
        triples: (x, y, z), each once.

    Example:
        >>> instance = Matching(2, ((0, 0, 0), (0, 1, 1), (1, 0, 0)))  # the example of the paper's figure
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
        """n triples that cover each element once, or None: x by x, going back where nothing is left."""

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
        """Whether these are n of its triples, and cover each element once."""
        whole = set(range(self.n))
        return (
            len(triples) == self.n
            and set(triples) <= set(self.triples)
            and all({triple[axis] for triple in triples} == whole for axis in range(3))
        )

    def is_joined(self) -> bool:
        """Whether (x, y, z) is a triple wherever (x, y) and (y, z) are parts of triples.

        Example:
            >>> Matching(2, ((0, 0, 1), (1, 0, 0))).is_joined()  # (0, 0) and (0, 0) are there, (0, 0, 0) is not
            False
        """
        return all((x, y, w) in self.triples for x, y, _ in self.triples for _, v, w in self.triples if v == y)


def draw(n: int, n_triples: int, seed: int) -> Matching:
    """A random instance; whether it has a matching is chance.

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
    """A biclustering problem that stands for an instance of 3-dimensional matching.

    Args:
        scores: ``(N, M)`` float64: scores P, or weights of a max-mass problem. Any such matrix is a product of queries
            and keys: Q = P and K = I will do.
        problem: what biclusterings of them cost.
        threshold: some biclustering costs no more if there is a matching, and by `by_triples` only then.
    """

    instance: Matching
    scores: Tensor
    problem: SetCosts
    threshold: float

    def is_reached(self, total: float) -> bool:
        """Whether this cost is at most the threshold, but for rounding."""
        return total <= self.threshold + 1e-9


def by_pairs(instance: Matching, r1: float = 4.0, r2: float = 1.0) -> Reduction:
    """The paper's construction (Lemma 1): a max-mass problem with n clusters of 2 queries and 2 keys.

    Queries are X, then Z; keys are X, then Y. A key x is worth r_1 to its own query; a key y is worth r_1 to a query x
    and r_2 to a query z with which it is in some triple. The threshold on the mass is n (2 r_1 + r_2). **It loses the
    triples**: see above.

    Args:
        r1, r2: 0 < r_2 < r_1.

    Example:
        >>> from smyrf.experiments.theory.biclustering import search
        >>> instance = Matching(2, ((0, 0, 1), (1, 0, 0), (1, 1, 1)))
        >>> reduction = by_pairs(instance)
        >>> instance.solve(), reduction.is_reached(search(reduction.problem).total)  # reached, and no matching
        (None, True)
    """
    if not 0.0 < r2 < r1:
        raise ValueError(f"{r1=} and {r2=} must be positive, and r2 the smaller one")
    n = instance.n
    weights = torch.zeros(2 * n, 2 * n, dtype=torch.float64)
    weights[:n, :n] = r1 * torch.eye(n)
    for x, y, z in instance.triples:
        weights[x, n + y] = r1
        weights[n + z, n + y] = r2
    return Reduction(instance, weights, mass_costs(weights, n), -n * (2 * r1 + r2))


def clusters_by_pairs(instance: Matching, matching: Sequence[Triple]) -> Biclustering:
    """The clusters of `by_pairs` that a matching stands for: queries x and z with keys x and y."""
    n = instance.n
    return Biclustering(
        torch.tensor([(x, n + z) for x, _, z in matching]), torch.tensor([(x, n + y) for x, y, _ in matching])
    )


def with_special_keys(p: Tensor, a: float) -> Tensor:
    """The scores with a key more for each query, whose score is a for that query and −∞ for all others: ``(N, M + N)``.

    The second step of the paper's proof. With as many clusters as before, each holds the special keys of its queries
    once a is large enough. What the objective then tends to, which is not what the proof says, is above.

    Example:
        >>> import torch
        >>> with_special_keys(torch.zeros(2, 1), 5.0)
        tensor([[    0.,     5., -1000.],
                [    0., -1000.,     5.]])
    """
    special = torch.full((len(p), len(p)), NEVER, dtype=p.dtype).fill_diagonal_(a)
    return torch.cat([p, special], dim=1)


def by_triples(instance: Matching) -> Reduction:
    """A construction that keeps the triples: softmax scores, with t = |T| clusters of 2 queries and 3 keys.

    Queries: one for each triple; a *chooser* for each x, and t − n spare ones. Keys: for each chooser one of its own;
    one for each y and each z; 2 (t − n) spare ones. Scores: 0 for pairs that are *allowed*, log 4t for a chooser and
    its own key, −∞ for all others. Allowed are

    - a triple with the own key of its x's chooser, with its y and its z, with all spare keys and own keys of spare
      choosers;
    - the chooser of an x with every y and z; a spare chooser with every spare key.

    The threshold on the squared objective is what it costs if every query is at its least cost. It is reached if and
    only if there is a matching:

    1. A triple's query has weight 1 / d on each of d allowed keys. If its cluster has m ≥ 1 of them, it costs 1 / m −
       1 / d, if none 1 / 3 + 1 / d. So it is at its least if and only if its three keys are allowed.
    2. A chooser has more than half of its weight on its own key. With p its weights, and m and s the sums of p and of
       p² over its cluster, it costs Σ p² − s (2m − 1) / m²: more than Σ p² without the own key, and with it less, the
       larger s and m are. So it is at its least if and only if it has its own key and two that are allowed.
    3. If all are at their least, no two choosers share a cluster, for the own key of one is not allowed to the other.
       So each cluster has one chooser and one triple. The chooser of x has its own key, so the triple is one with x,
       and two keys that are allowed to both: this triple's y and z. These n triples are a matching.
    4. From a matching, `clusters_by_triples` makes clusters in which all is allowed.

    It is polynomial: 2t queries, 3t keys, and for −∞ any score will do that is low enough for 1 and 2 (here −1000).

    Raises:
        ValueError: there are fewer triples than n, so that there is no matching to look for.

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
        raise ValueError(f"triples={instance.triples} are fewer than n={n}: there is no matching to look for")
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
    for count, others in ((n, 2 * n), (t - n, 2 * (t - n))):  # choosers, and what each is allowed beside its own key
        inside, dense = own_weight + 2, own_weight + others  # denominators
        gain = 1 / inside - 1 / dense
        threshold += count * ((own_weight * gain) ** 2 + 2 * gain**2 + (others - 2) / dense**2)
    return Reduction(instance, scores, softmax_costs(scores, t), threshold)


def clusters_by_triples(instance: Matching, matching: Sequence[Triple]) -> Biclustering:
    """The clusters of `by_triples` that a matching stands for; triples that are left go to spare choosers."""
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
    """The triples that share a cluster of `by_triples` with the chooser of an x: a matching, at the threshold."""
    n, t = instance.n, len(instance.triples)
    choosers = range(t, t + n)
    return tuple(
        instance.triples[first]
        for first, second in clusters.queries.sort(dim=1).values.tolist()
        if first < t and second in choosers
    )
