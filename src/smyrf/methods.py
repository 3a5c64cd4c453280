"""What to compute: a method is a frozen, validated description, with the paper's cost measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

TRANSFORMS = ("asymmetric", "none", "xbox", "h2lsh", "l2lsh")
HASHINGS = ("projection", "cross_polytope")


@dataclass(frozen=True)
class Smyrf:
    """Attention inside balanced clusters found by asymmetric LSH (the paper's method).

    Args:
        n_hashes: hashing rounds H; each makes its own clusters, merged by softmax mass (eq. 9).
        cluster_size: queries per cluster C; keys per cluster follow from the number of clusters.
        transform: "asymmetric" (eq. 4); the paper's ablations "none" (plain E2LSH), "xbox", "h2lsh"
            and "l2lsh".
        hashing: "projection" (eq. 8), or "cross_polytope" (Reformer's angular LSH).
        deduplicate: a pair that meets in several rounds counts once, not once per round.

    Example:
        >>> method = Smyrf(n_hashes=4, cluster_size=64)
        >>> method.key_visits(4096), method.memory_share(4096)
        (256, 0.0625)
    """

    n_hashes: int = 8
    cluster_size: int = 32
    transform: str = "asymmetric"
    hashing: str = "projection"
    deduplicate: bool = False

    def __post_init__(self) -> None:
        for name in ("n_hashes", "cluster_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r} must be an int, not {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name, known in (("transform", TRANSFORMS), ("hashing", HASHINGS)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}")
        if not isinstance(self.deduplicate, bool):
            raise TypeError(f"deduplicate={self.deduplicate!r} must be a bool")

    def n_clusters(self, n_queries: int, n_keys: int) -> int:
        """L, as many clusters as hold at most `cluster_size` queries and at least one key each.

        Example:
            >>> Smyrf(cluster_size=16).n_clusters(24, 24)
            2
        """
        return min(-(-n_queries // self.cluster_size), n_keys)

    def key_visits(self, n_keys: int, n_queries: int | None = None) -> int:
        """Keys that a query is compared with, over all rounds: H · ⌈M / L⌉.

        Example:
            >>> Smyrf(8, 32).key_visits(1024), Smyrf(8, 32).key_visits(20)
            (256, 20)
        """
        n_clusters = self.n_clusters(n_keys if n_queries is None else n_queries, n_keys)
        if n_clusters == 1:  # all rounds would be the same dense attention: it is run once
            return n_keys
        return self.n_hashes * -(-n_keys // n_clusters)

    def memory_share(self, n_keys: int, n_queries: int | None = None) -> float:
        """The paper's "memory": key visits as a share of all keys, H · C_k / M.

        Example:
            >>> Smyrf(n_hashes=32, cluster_size=64).memory_share(4096)
            0.5
        """
        return self.key_visits(n_keys, n_queries) / n_keys


@dataclass(frozen=True)
class Dense:
    """Exact attention, by ``F.scaled_dot_product_attention``.

    Example:
        >>> Dense().key_visits(512), Dense().memory_share(512)
        (512, 1.0)
    """

    def key_visits(self, n_keys: int, n_queries: int | None = None) -> int:
        """All keys.

        Example:
            >>> Dense().key_visits(77)
            77
        """
        return n_keys

    def memory_share(self, n_keys: int, n_queries: int | None = None) -> float:
        """Everything: 1.0.

        Example:
            >>> Dense().memory_share(77)
            1.0
        """
        return 1.0


Method: TypeAlias = Smyrf | Dense


def check_method(method: object) -> None:
    """Raises unless `method` is one of ours, with a hint if the class itself was given."""
    if isinstance(method, Smyrf | Dense):
        return
    if isinstance(method, type) and issubclass(method, Smyrf | Dense):
        raise TypeError(f"method={method!r} must be an instance: write {method.__name__}()")
    raise TypeError(f"method={method!r} must be a Smyrf or a Dense, not {type(method).__name__}")
