"""From a budget to sizes: how many clusters, near keys and far keys Tangent attention uses.

Each level clusters the queries more finely than the one before, looks at the keys that the level before has
kept, keeps the best of them and folds the others into a few far keys (`smyrf.grouping.tangent`). A key visit is
one inner product and one weighted sum, D + E multiplications. A level of clusters of C queries on n
candidates costs each query n / 2C visits for the scores of its centroid and (n − kept) / C for the fold;
its far keys, and the last level's near keys, are visited by every query.

Letters: N queries, M keys, L clusters, C queries per cluster, u key visits per query.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# How the budget is shared, as measured on pretrained models (benchmarks/README.md). Scoring and folding take this
# share of it where there is one level; with several, at the last level, and at all levels above together.
ONE_LEVEL, LAST_LEVEL, UPPER_LEVELS = 0.375, 0.22, 0.15
# Where several levels give a smaller error in the same time: from so many keys on, and so many per visit. There these
# shares are halved, because scoring and folding take more time per visit than near keys, but less in larger clusters.
CROSSOVER_KEYS, CROSSOVER_RATIO = 49152, 64
# Queries of a cluster of the last level at least, where it is the only one, and where there are several.
MIN_SIZE, MIN_LAST_SIZE = 16, 8
MIN_NEAR = 8
# Candidates fall by equal factors from all keys to this share of the budget, about what is kept at last.
KEPT_SHARE = 0.6
# Far keys of all levels together, as a share of the budget.
FAR_SHARE = 1 / 16


class Level(NamedTuple):
    """Sizes of one level.

    Args:
        n_clusters: L, a power of two.
        cluster_size: C = ⌈N / L⌉, queries per cluster.
        n_candidates: keys that a cluster looks at.
        n_near: of these, the keys that it keeps.
        n_far: far keys into which it folds the others.

    Example:
        >>> Level(n_clusters=32, cluster_size=16, n_candidates=512, n_near=76, n_far=8).visits
        51.25
    """

    n_clusters: int
    cluster_size: int
    n_candidates: int
    n_near: int
    n_far: int

    @property
    def visits(self) -> float:
        """Key visits per query that this level costs, its near keys apart."""
        folded = self.n_candidates - self.n_near
        return (0.5 * self.n_candidates + folded) / self.cluster_size + self.n_far


def visits(levels: tuple[Level, ...]) -> float:
    """Key visits per query of all levels together.

    Example:
        >>> visits((Level(32, 16, 512, 76, 8),))
        127.25
    """
    return sum(level.visits for level in levels) + levels[-1].n_near


def size_levels(
    n_queries: int,
    n_keys: int,
    budget: float,
    n_levels: int,
    *,
    cluster_size: int | None = None,
    n_near: int | None = None,
    n_far: int | None = None,
) -> tuple[Level, ...]:
    """Sizes that spend `budget` key visits per query, or () where dense attention costs no more.

    Sizes that are given are taken as they are: `cluster_size` and `n_near` of the last level, `n_far` of each.
    The number of clusters is a power of two, so that clusters may be smaller than asked for. Where the budget is too
    small for so many levels, there are fewer.

    Example:
        >>> size_levels(512, 512, 128, 1)
        (Level(n_clusters=32, cluster_size=16, n_candidates=512, n_near=76, n_far=8),)
        >>> [level.n_near for level in size_levels(16384, 16384, 576, 2)]
        [2379, 356]
        >>> size_levels(512, 512, 512, 1)  # all keys: dense
        ()
    """
    if n_queries < 1 or n_keys < 1:
        raise ValueError(f"{n_queries=} and {n_keys=} must be at least 1")
    if budget >= n_keys:
        return ()
    half = 0.5 if default_levels(n_keys, budget) > 1 else 1.0
    far = _power_of_two(FAR_SHARE * budget / n_levels) if n_far is None else n_far
    fall = (min(KEPT_SHARE * budget, n_keys) / n_keys) ** (1 / n_levels)
    last = n_keys * fall ** (n_levels - 1)  # candidates of the last level
    if cluster_size is not None:
        n_clusters = 2 ** math.ceil(math.log2(max(n_queries / cluster_size, 1.0)))
    elif n_levels == 1:
        n_clusters = _power_of_two(n_queries / max(1.5 * n_keys / (ONE_LEVEL * budget), MIN_SIZE))
    else:
        n_clusters = _power_of_two(n_queries / max(1.5 * last / (half * LAST_LEVEL * budget), MIN_LAST_SIZE))

    levels: list[Level] = []
    n = n_keys
    for i in range(1, n_levels):
        kept = max(int(n_keys * fall**i), MIN_NEAR)
        # The keys of a cluster's branch of the tree must fit twice into what it keeps.
        size = min(1.5 * n * (n_levels - 1) / (half * UPPER_LEVELS * budget), kept * n_queries / (2 * n_keys))
        coarse = _power_of_two(n_queries / size)
        if kept < n and coarse < n_clusters and (not levels or coarse > levels[-1].n_clusters):
            levels.append(Level(coarse, -(-n_queries // coarse), n, kept, far))
            n = kept
    leaf = Level(n_clusters, -(-n_queries // n_clusters), n, 0, far)
    if n_near is None:  # what is left, solved for: a near key is one that is not folded
        rest = budget - sum(level.visits for level in levels) - leaf.visits
        n_near = max(int(rest / (1 - 1 / max(leaf.cluster_size, 2))), MIN_NEAR)
        if n_levels > 1 and rest < MIN_NEAR:
            return size_levels(n_queries, n_keys, budget, n_levels - 1, cluster_size=cluster_size, n_far=n_far)
    leaf = leaf._replace(n_near=min(n_near, n))
    found = (*levels, leaf)
    return () if leaf.n_near >= n_keys or visits(found) >= n_keys else found


def _power_of_two(x: float) -> int:
    return int(2 ** round(math.log2(max(x, 1.0))))


def default_levels(n_keys: int, budget: float) -> int:
    """How many levels give the smallest error in a given time: one up to the measured crossover.

    One level has won at 16,384 keys and, by little, at 32,768; two at 65,536 with 64 keys per visit or more. Three have
    not won anywhere.

    Example:
        >>> default_levels(512, 128), default_levels(65536, 512)
        (1, 2)
    """
    return 1 if n_keys < CROSSOVER_KEYS or n_keys / budget < CROSSOVER_RATIO else 2
