"""`Method`, the interface of a method, and `Layout`, its sizes for one problem.

Nothing in this package imports a framework: PyTorch and JAX share it.

Letters: N queries, M keys.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from smyrf.methods.causal import CausalLayout, causal_layout


@dataclass(frozen=True)
class Layout:
    """Sizes and cost of a method for N queries and M keys, without a causal mask.

    Args:
        n_queries: N.
        n_keys: M.
        is_exact: the result equals dense attention to rounding.
        key_visits: keys that a query is compared with, including its share of what is done once per cluster.

    Example:
        >>> from smyrf.methods import Smyrf
        >>> layout = Smyrf(n_hashes=4, cluster_size=64).plan(4096, 4096)
        >>> layout.n_clusters, layout.key_visits, layout.memory_share
        (64, 256, 0.0625)
    """

    n_queries: int
    n_keys: int
    is_exact: bool
    key_visits: int

    @property
    def memory_share(self) -> float:
        """Key visits as a share of all keys; the paper's "memory"."""
        return self.key_visits / self.n_keys


class Method(ABC):
    """What to compute: a frozen, validated description.

    A method is a frozen dataclass. It says how large its parts are for a given problem (`plan`), whether it is
    random, how it is labelled, and how it is written as JSON. `smyrf.grouping` knows how it groups queries and keys.

    Attributes:
        kind: name in JSON and on the command line.
        typed: how it is typed on the command line, with an example; "" if only JSON can describe it.
        is_random: whether a call draws random numbers.
        has_far_keys: whether its groups hold keys computed from k and v, through which gradients flow.
        is_dense: whether it is dense attention by definition, whatever the sizes.
        is_scalable: whether `scaled` can change its key visits.
    """

    kind: ClassVar[str]
    typed: ClassVar[str] = ""
    is_random: ClassVar[bool] = False
    has_far_keys: ClassVar[bool] = False
    is_dense: ClassVar[bool] = False
    is_scalable: ClassVar[bool] = False

    @abstractmethod
    def _plan(self, n_queries: int, n_keys: int) -> Layout:
        """Sizes without a causal mask."""

    def plan(self, n_queries: int, n_keys: int, is_causal: bool = False) -> Layout | CausalLayout:
        """Sizes and cost for N queries and M keys.

        Example:
            >>> from smyrf.methods import Tangent
            >>> Tangent(128).plan(4096, 4096).key_visits, Tangent(128).plan(4096, 4096, is_causal=True).key_visits
            (128, 385)
        """
        if n_queries < 1 or n_keys < 1:
            raise ValueError(f"{n_queries=} and {n_keys=} must be at least 1")
        return causal_layout(self, n_queries, n_keys) if is_causal else self._plan(n_queries, n_keys)

    def is_exact(self, n_queries: int, n_keys: int) -> bool:
        """Whether the result equals dense attention to rounding.

        Example:
            >>> from smyrf.methods import Smyrf, Tangent
            >>> Smyrf(cluster_size=64).is_exact(64, 1000), Tangent(64).is_exact(512, 512)
            (True, False)
        """
        return self.plan(n_queries, n_keys).is_exact

    def key_visits(self, n_keys: int, n_queries: int | None = None) -> int:
        """Keys that a query is compared with; as many queries as keys unless given.

        Example:
            >>> from smyrf.methods import Smyrf, Tangent
            >>> Smyrf(8, 32).key_visits(1024), Tangent(256).key_visits(100)
            (256, 100)
        """
        return self.plan(n_keys if n_queries is None else n_queries, n_keys).key_visits

    def memory_share(self, n_keys: int, n_queries: int | None = None) -> float:
        """Key visits as a share of all keys; the paper's "memory".

        Example:
            >>> from smyrf.methods import Smyrf
            >>> Smyrf(n_hashes=32, cluster_size=64).memory_share(4096)
            0.5
        """
        return self.key_visits(n_keys, n_queries) / n_keys

    def scaled(self, factor: float, n_queries: int, n_keys: int, shares: tuple[float, float] = (0.0, 1.0)) -> Method:
        """The method with about `factor` times its key visits.

        Args:
            factor: above 1 the visits are rounded up, below 1 down.
            shares: least and greatest key visits, as shares of M. A size that already exceeds the greatest because
                this sequence is short is not lowered by a factor of 1 or more.

        Raises:
            ValueError: its key visits do not follow from one size.

        Example:
            >>> from smyrf.methods import Smyrf, Tangent
            >>> Tangent(0.25).scaled(2.0, 512, 512).budget, Smyrf(8, 32).scaled(0.7, 512, 512).n_hashes
            (0.5, 5)
        """
        raise ValueError(f"{self.label} has no size that can be scaled")

    @property
    def size_label(self) -> str:
        """Sizes in short, for tables; "" if there are none."""
        return ""

    @property
    def variant(self) -> str:
        """Options that differ from the default, sizes excepted; "" if none does."""
        return ""

    @property
    def family(self) -> str:
        """Name without sizes: methods that differ only in size share it.

        Example:
            >>> from smyrf.methods import Smyrf, Tangent
            >>> Smyrf(4, 32, transform="xbox", deduplicate=True).family, Tangent(64, levels=2).family
            ('Smyrf, xbox, pairs once', 'Tangent, 2 levels')
        """
        name = type(self).__name__
        return f"{name}, {self.variant}" if self.variant else name

    @property
    def label(self) -> str:
        """Name with sizes and options, for tables and plots.

        Example:
            >>> from smyrf.methods import Dense, Smyrf, Tangent
            >>> Tangent(0.25).label, Smyrf(4, 64).label, Smyrf(4, 64, transform="none").label, Dense().label
            ('Tangent 25%', 'Smyrf 4×64', 'Smyrf 4×64, E2LSH', 'Dense')
        """
        name = " ".join(part for part in (type(self).__name__, self.size_label) if part)
        return f"{name}, {self.variant}" if self.variant else name

    def to_dict(self) -> dict[str, Any]:
        """The method as JSON; `method_from_dict` reads it.

        Example:
            >>> from smyrf.methods import Dense
            >>> Dense().to_dict()
            {'kind': 'dense'}
        """
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Method:
        """The method from the options that `to_dict` writes beside its kind."""
        return cls(**options)

    @classmethod
    def parse_size(cls, text: str) -> dict[str, Any]:
        """Options from the size after a kind, such as "8x32", or "" without one; raises ValueError if it is wrong."""
        if text:
            raise ValueError(f"{cls.kind} takes no size")
        return {}


def dense_layout(n_queries: int, n_keys: int) -> Layout:
    """The layout of dense attention.

    Example:
        >>> dense_layout(5, 7).key_visits
        7
    """
    return Layout(n_queries, n_keys, is_exact=True, key_visits=n_keys)


def check_positive(method: Method, *names: str) -> None:
    """Raises unless each option is an int of at least 1, or None where None is the default."""
    for name in names:
        value = getattr(method, name)
        if value is None and type(method).__dataclass_fields__[name].default is None:  # type: ignore[attr-defined]
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be an int, not {type(value).__name__}")
        if value >= 2**31:  # it may have too many digits to be shown
            raise ValueError(f"{name}={value if value < 10**20 else '10²⁰ or more'} must be below 2³¹")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def scale_count(count: int, factor: float, least: float, most: float) -> int:
    """A count times a factor, within limits that do not move it against the factor.

    Example:
        >>> scale_count(8, 1.25, 1, 100), scale_count(8, 0.7, 1, 100), scale_count(8, 2.0, 1, 10)
        (10, 5, 10)
        >>> scale_count(8, 2.0, 1, 4)
        8
    """
    number = math.ceil(count * factor) if factor > 1.0 else math.floor(count * factor)
    bounded = max(min(max(number, math.ceil(least)), math.floor(most)), 1)
    return max(bounded, count) if factor >= 1.0 else min(bounded, count)


def mean_visits(visits: list[int]) -> int:
    """Mean of key visits, rounded up.

    Example:
        >>> mean_visits([64, 129])
        97
    """
    return math.ceil(sum(visits) / len(visits))
