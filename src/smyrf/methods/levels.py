"""From a budget to sizes: how many clusters, near keys and far keys Tangent attention uses.

Each level clusters the queries more finely than the one before, looks at the keys that the level before has kept, keeps
the best of them and folds the others into a few far keys (`smyrf.grouping.tangent`). A key visit is one inner product
and one weighted sum, D + E multiplications. A level of clusters of C queries on n candidates costs each query n / 2C
visits for the scores of its centroid and (n − kept) / C for the fold; every query visits its far keys, and the near
keys of the last level. This counts the arithmetic of the method. What a backend computes twice to save memory (the
native one scores twice and folds over kept keys) and the tree, which is O(log L) per query, are not counted.

Letters: N queries, M keys, L clusters, C queries per cluster, u key visits per query.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# How the budget is shared, as measured on pretrained models (benchmarks/README.md). Scoring and folding take this
# share of it where there is one level; with several, at the last level, and at all levels above together.
ONE_LEVEL, LAST_LEVEL, UPPER_LEVELS = 0.375, 0.22, 0.15
# From this many keys, and this many per visit, several levels give a smaller error in the same time. There these shares
# are halved, because scoring and folding take more time per visit than near keys, but less in larger clusters.
CROSSOVER_KEYS, CROSSOVER_RATIO = 49152, 64
# Least queries per cluster of the last level: where it is the only one, and where there are several.
MIN_SIZE, MIN_LAST_SIZE = 16, 8
MIN_NEAR = 8
# Candidates fall by equal factors from all keys to this share of the budget, about what the last level keeps.
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
        n_far: far keys that it folds the others into.

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
        """Key visits per query that this level costs, its near keys excepted."""
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
    """Sizes that spend at most `budget` key visits per query, or () where dense attention costs no more.

    Given sizes are kept: `cluster_size` and `n_near` of the last level, `n_far` of each. The number of clusters is a
    power of two, so clusters may be smaller than asked for. A budget too small for `n_levels` gives fewer levels. The
    least that Tangent attention can cost is one cluster of all queries with `MIN_NEAR` near keys and one far key,
    1.5 · M / N + MIN_NEAR + 1 visits; a smaller budget costs that.

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
        spent = sum(level.visits for level in levels)
        n_near = _affordable(leaf, budget - spent)
        if n_levels > 1 and n_near < MIN_NEAR:
            return size_levels(n_queries, n_keys, budget, n_levels - 1, cluster_size=cluster_size, n_far=n_far)
        while cluster_size is None and n_near < MIN_NEAR and leaf.n_clusters > 1:  # larger clusters share more
            n_clusters = leaf.n_clusters // 2
            far = max(leaf.n_far // 2, 1) if n_far is None else n_far
            leaf = Level(n_clusters, -(-n_queries // n_clusters), n, 0, far)
            n_near = _affordable(leaf, budget - spent)
        if n_near < MIN_NEAR and n_far is None:
            leaf = leaf._replace(n_far=1)
            n_near = _affordable(leaf, budget - spent)
        n_near = max(n_near, MIN_NEAR)
    leaf = leaf._replace(n_near=min(n_near, n))
    found = (*levels, leaf)
    return () if leaf.n_near >= n_keys or visits(found) >= n_keys else found


def _affordable(leaf: Level, budget: float) -> int:
    """Near keys for which a budget is enough at the last level."""
    return int((budget - leaf.visits) / (1 - 1 / max(leaf.cluster_size, 2)))


def _power_of_two(x: float) -> int:
    return int(2 ** round(math.log2(max(x, 1.0))))


def default_levels(n_keys: int, budget: float) -> int:
    """Levels that give the smallest error in a given time: one up to the measured crossover, then two.

    One level wins at 16,384 keys and, narrowly, at 32,768; two win at 65,536 with 64 keys per visit or more. Three win
    nowhere.

    Example:
        >>> default_levels(512, 128), default_levels(65536, 512)
        (1, 2)
    """
    return 1 if n_keys < CROSSOVER_KEYS or n_keys / budget < CROSSOVER_RATIO else 2
