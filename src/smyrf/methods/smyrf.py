"""`Smyrf`: the paper's method.

Letters: N queries, M keys, H rounds, L clusters, C queries per cluster.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from smyrf.methods.base import Layout, Method, check_positive, dense_layout, scale_count
from smyrf.methods.numbers import typed_number

TRANSFORMS = ("asymmetric", "none", "xbox", "h2lsh", "l2lsh")
HASHINGS = ("projection", "cross_polytope")


@dataclass(frozen=True)
class SmyrfLayout(Layout):
    """Sizes of `Smyrf`.

    Args:
        n_clusters: L.
    """

    n_clusters: int


@dataclass(frozen=True)
class Smyrf(Method):
    """Attention inside balanced clusters found by asymmetric LSH (the paper's method).

    Args:
        n_hashes: hashing rounds H; each makes its own clusters, merged by softmax mass (eq. 15).
        cluster_size: queries per cluster C; keys per cluster follow from the number of clusters.
        transform: "asymmetric" (eq. 4); the paper's ablations "none" (plain E2LSH), "xbox", "h2lsh" and "l2lsh".
        hashing: "projection" (eq. 14), or "cross_polytope" (Reformer's angular LSH).
        deduplicate: count a pair that meets in several rounds once, not once per round.

    Example:
        >>> method = Smyrf(n_hashes=4, cluster_size=64)
        >>> method.key_visits(4096), method.memory_share(4096)
        (256, 0.0625)
    """

    kind: ClassVar[str] = "smyrf"
    typed: ClassVar[str] = "smyrf:8x32 (rounds × cluster size)"
    is_random: ClassVar[bool] = True
    is_scalable: ClassVar[bool] = True

    n_hashes: int = 8
    cluster_size: int = 32
    transform: str = "asymmetric"
    hashing: str = "projection"
    deduplicate: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "n_hashes", "cluster_size")
        for name, known in (("transform", TRANSFORMS), ("hashing", HASHINGS)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}")
        if not isinstance(self.deduplicate, bool):
            raise TypeError(f"deduplicate={self.deduplicate!r} must be a bool")

    def n_clusters(self, n_queries: int, n_keys: int) -> int:
        """L: as many clusters as hold at most `cluster_size` queries and at least one key each.

        Example:
            >>> Smyrf(cluster_size=16).n_clusters(24, 24)
            2
        """
        return min(-(-n_queries // self.cluster_size), n_keys)

    def _plan(self, n_queries: int, n_keys: int) -> Layout:
        n_clusters = self.n_clusters(n_queries, n_keys)
        if n_clusters == 1:  # all rounds would compute the same dense attention: it runs once
            return dense_layout(n_queries, n_keys)
        visits = self.n_hashes * -(-n_keys // n_clusters)  # H · ⌈M / L⌉
        return SmyrfLayout(n_queries, n_keys, is_exact=False, key_visits=visits, n_clusters=n_clusters)

    def scaled(self, factor: float, n_queries: int, n_keys: int, shares: tuple[float, float] = (0.0, 1.0)) -> Smyrf:
        """The method with about `factor` times its rounds.

        Example:
            >>> Smyrf(8, 32).scaled(1.25, 512, 512)
            Smyrf(n_hashes=10, cluster_size=32, ...)
        """
        per_round = -(-n_keys // self.n_clusters(n_queries, n_keys))  # ⌈M / L⌉
        least, most = (share * n_keys / per_round for share in shares)
        return replace(self, n_hashes=scale_count(self.n_hashes, factor, least, most))

    @property
    def size_label(self) -> str:
        return f"{self.n_hashes}×{self.cluster_size}"

    @property
    def variant(self) -> str:
        words = []
        if self.transform != "asymmetric":
            words.append("E2LSH" if self.transform == "none" else self.transform)
        if self.hashing != "projection":
            words.append("cross-polytope")
        if self.deduplicate:
            words.append("pairs once")
        return ", ".join(words)

    @classmethod
    def parse_size(cls, text: str) -> dict[str, Any]:
        """Rounds × cluster size.

        Example:
            >>> Smyrf.parse_size("8x32")
            {'n_hashes': 8, 'cluster_size': 32}
        """
        numbers = re.split("[x×]", text)
        if len(numbers) != 2:
            raise ValueError("its size is missing")
        return {"n_hashes": typed_number(numbers[0]), "cluster_size": typed_number(numbers[1])}
