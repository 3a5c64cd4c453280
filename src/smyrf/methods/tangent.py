"""`Tangent`: near keys one by one, all others folded into far keys."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

from smyrf.methods.base import Layout, Method, check_positive, dense_layout, scale_count
from smyrf.methods.levels import Level, default_levels, size_levels, visits
from smyrf.methods.numbers import typed_number

# Each level has at least twice the clusters of the one above, and there are fewer than 2³¹ queries.
MAX_LEVELS = 31


@dataclass(frozen=True)
class TangentLayout(Layout):
    """Sizes of `Tangent`.

    Args:
        levels: from the coarsest to the leaves.
    """

    levels: tuple[Level, ...]


@dataclass(frozen=True)
class Tangent(Method):
    """Attention to near keys one by one and to all others folded into a few far keys. Deterministic, no retraining.

    A tree clusters the queries. Each cluster's centroid scores the keys, the best become its near keys, and the
    others are folded into far keys, tangents of their softmax mass (`smyrf.grouping.tangent`). With several levels,
    coarse clusters choose the keys that finer ones look at.

    Args:
        budget: key visits per query, as a share of the keys (a float in (0, 1]) or as a number (an int). A visit is
            D + E multiplications. Near keys and far keys count once per query; scoring a cluster's candidates and
            folding them count once per cluster, divided by its queries. The tree and what a backend computes twice to
            save memory do not count. With few queries, few share the pass over the keys: N queries on M keys cost
            about 1.5 · M / N + 9 visits at least, whatever the budget.
        levels: number of levels; None chooses by length and budget.
        cluster_size: queries per cluster of the last level, at most; None follows from the budget, like the next two.
        n_near: near keys of each of these clusters.
        n_far: far keys of each level.
        rank: directions in which the tree sees queries and keys.

    Example:
        >>> method = Tangent(budget=0.25)
        >>> method.key_visits(512), method.memory_share(512) <= 0.25
        (128, True)
        >>> Tangent(128).sizes(512)
        (Level(n_clusters=32, cluster_size=16, n_candidates=512, n_near=76, n_far=8),)
    """

    kind: ClassVar[str] = "tangent"
    typed: ClassVar[str] = "tangent:0.25 (share of the keys), tangent:128 (key visits)"
    has_far_keys: ClassVar[bool] = True
    is_scalable: ClassVar[bool] = True

    budget: float | int = 0.25
    _: KW_ONLY
    levels: int | None = None
    cluster_size: int | None = None
    n_near: int | None = None
    n_far: int | None = None
    rank: int = 12

    def __post_init__(self) -> None:
        if not isinstance(self.budget, int | float) or isinstance(self.budget, bool):
            raise TypeError(f"budget={self.budget!r} must be a share (float) or a number of key visits (int)")
        if isinstance(self.budget, float) and not 0.0 < self.budget <= 1.0:
            raise ValueError(f"budget={self.budget} must be in (0, 1]; key visits are given as an int")
        if isinstance(self.budget, int):
            check_positive(self, "budget")
        check_positive(self, "levels", "cluster_size", "n_near", "n_far", "rank")
        if self.levels is not None and self.levels > MAX_LEVELS:
            raise ValueError(f"levels={self.levels} must be at most {MAX_LEVELS}")

    def sizes(self, n_keys: int, n_queries: int | None = None) -> tuple[Level, ...]:
        """Sizes of each level; () where dense attention costs no more.

        Example:
            >>> Tangent(1.0).sizes(512)
            ()
        """
        layout = self.plan(n_keys if n_queries is None else n_queries, n_keys)
        return layout.levels if isinstance(layout, TangentLayout) else ()

    def _plan(self, n_queries: int, n_keys: int) -> Layout:
        budget = self.budget if isinstance(self.budget, int) else self.budget * n_keys
        n_levels = default_levels(n_keys, budget) if self.levels is None else self.levels
        levels = size_levels(
            n_queries,
            n_keys,
            budget,
            n_levels,
            cluster_size=self.cluster_size,
            n_near=self.n_near,
            n_far=self.n_far,
        )
        if not levels:
            return dense_layout(n_queries, n_keys)
        spent = math.ceil(visits(levels))
        return TangentLayout(n_queries, n_keys, is_exact=False, key_visits=spent, levels=levels)

    def scaled(self, factor: float, n_queries: int, n_keys: int, shares: tuple[float, float] = (0.0, 1.0)) -> Tangent:
        """The method with `factor` times its budget.

        Example:
            >>> Tangent(64).scaled(1.25, 512, 512), Tangent(0.25).scaled(0.5, 512, 512, shares=(0.2, 1.0))
            (Tangent(budget=80, ...), Tangent(budget=0.2, ...))
        """
        if self.n_near is not None:
            raise ValueError(f"n_near={self.n_near} sets the near keys, whatever the budget is")
        least, most = shares
        if isinstance(self.budget, int):
            return replace(self, budget=scale_count(self.budget, factor, least * n_keys, most * n_keys))
        return replace(self, budget=min(max(self.budget * factor, least), most))

    @property
    def size_label(self) -> str:
        return f"{100 * self.budget:.3g}%" if isinstance(self.budget, float) else str(self.budget)

    @property
    def variant(self) -> str:
        if self.levels is None:
            return ""
        return "one level" if self.levels == 1 else f"{self.levels} levels"

    @classmethod
    def parse_size(cls, text: str) -> dict[str, Any]:
        """A budget: a share if there is a point, else key visits.

        Example:
            >>> Tangent.parse_size("0.25"), Tangent.parse_size("128")
            ({'budget': 0.25}, {'budget': 128})
        """
        if not text:
            raise ValueError("its size is missing")
        return {"budget": typed_number(text)}
