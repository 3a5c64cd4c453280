"""What to compute: a method is a frozen, validated description, with the paper's cost measures."""

from __future__ import annotations

import math
import re
from dataclasses import KW_ONLY, asdict, dataclass, fields
from typing import Any, TypeAlias

from smyrf.sizes import Level, default_levels, size_levels, visits

TRANSFORMS = ("asymmetric", "none", "xbox", "h2lsh", "l2lsh")
HASHINGS = ("projection", "cross_polytope")


@dataclass(frozen=True)
class Smyrf:
    """Attention inside balanced clusters found by asymmetric LSH (the paper's method).

    Args:
        n_hashes: hashing rounds H; each makes its own clusters, merged by softmax mass (eq. 15).
        cluster_size: queries per cluster C; keys per cluster follow from the number of clusters.
        transform: "asymmetric" (eq. 4); the paper's ablations "none" (plain E2LSH), "xbox", "h2lsh"
            and "l2lsh".
        hashing: "projection" (eq. 14), or "cross_polytope" (Reformer's angular LSH).
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
        _check_positive(self, "n_hashes", "cluster_size")
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

    def is_exact(self, n_queries: int, n_keys: int) -> bool:
        """Whether this is dense attention: all in one cluster.

        Example:
            >>> Smyrf(cluster_size=64).is_exact(64, 1000)
            True
        """
        return self.n_clusters(n_queries, n_keys) == 1

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
class Tangent:
    """Attention to the best keys one by one and to all others folded into a few: deterministic, no retraining.

    Queries are clustered by a tree, each cluster's centroid scores the keys, the best are kept, and the others
    become far keys, tangents of their softmax mass (`smyrf.tangent`). With several levels coarse clusters choose
    the keys that finer ones look at.

    Args:
        budget: key visits per query as a share of the keys (a float in (0, 1]) or as a number (an int);
            everything that is spent counts, clustering included.
        levels: how many; None chooses by length and budget.
        cluster_size: queries per cluster of the last level, at most; None follows from the budget, as do
            the next two.
        n_near: keys that each of these clusters keeps.
        n_far: far keys of each level.
        rank: directions in which the tree sees queries and keys.

    Example:
        >>> method = Tangent(budget=0.25)
        >>> method.key_visits(512), method.memory_share(512) <= 0.25
        (128, True)
        >>> Tangent(128).sizes(512)
        (Level(n_clusters=32, cluster_size=16, n_candidates=512, n_near=76, n_far=8),)
    """

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
        _check_positive(self, "budget", "levels", "cluster_size", "n_near", "n_far", "rank")

    def sizes(self, n_keys: int, n_queries: int | None = None) -> tuple[Level, ...]:
        """Sizes of each level; () where dense attention costs no more.

        Example:
            >>> Tangent(1.0).sizes(512)
            ()
        """
        n_queries = n_keys if n_queries is None else n_queries
        budget = self.budget if isinstance(self.budget, int) else self.budget * n_keys
        n_levels = default_levels(n_keys, budget) if self.levels is None else self.levels
        return size_levels(
            n_queries,
            n_keys,
            budget,
            n_levels,
            cluster_size=self.cluster_size,
            n_near=self.n_near,
            n_far=self.n_far,
        )

    def is_exact(self, n_queries: int, n_keys: int) -> bool:
        """Whether this is dense attention: it costs no more.

        Example:
            >>> Tangent(1.0).is_exact(512, 512), Tangent(512).is_exact(100, 400), Tangent(64).is_exact(512, 512)
            (True, True, False)
        """
        return len(self.sizes(n_keys, n_queries)) == 0

    def key_visits(self, n_keys: int, n_queries: int | None = None) -> int:
        """Keys that a query is compared with, and its share of what is done per cluster.

        Example:
            >>> Tangent(256).key_visits(4096), Tangent(256).key_visits(100)
            (256, 100)
        """
        sizes = self.sizes(n_keys, n_queries)
        return math.ceil(visits(sizes)) if sizes else n_keys

    def memory_share(self, n_keys: int, n_queries: int | None = None) -> float:
        """Key visits as a share of all keys, comparable with the paper's "memory".

        Example:
            >>> Tangent(1024).memory_share(4096)
            0.25
        """
        return self.key_visits(n_keys, n_queries) / n_keys


@dataclass(frozen=True)
class Dense:
    """Exact attention, by ``F.scaled_dot_product_attention``.

    Example:
        >>> Dense().key_visits(512), Dense().memory_share(512)
        (512, 1.0)
    """

    def is_exact(self, n_queries: int, n_keys: int) -> bool:
        """Always.

        Example:
            >>> Dense().is_exact(512, 512)
            True
        """
        return True

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


@dataclass(frozen=True)
class PerHead:
    """A method for each head of queries: heads differ in how much of their attention lies outside a few keys.

    Args:
        methods: as many as there are heads; those that are equal run together.

    Example:
        >>> method = PerHead((Tangent(64), Tangent(128), Tangent(64), Dense()))
        >>> method.key_visits(512), method.memory_share(512)
        (192, 0.375)
    """

    methods: tuple[Smyrf | Tangent | Dense, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.methods, tuple) or not self.methods:
            raise TypeError(f"methods={self.methods!r} must be a tuple with a method for each head")
        for method in self.methods:
            if not isinstance(method, Smyrf | Tangent | Dense):
                raise TypeError(f"methods must be of Smyrf, Tangent and Dense, not {method!r}")

    def groups(self) -> dict[Smyrf | Tangent | Dense, list[int]]:
        """The heads of each method.

        Example:
            >>> PerHead((Tangent(64), Dense(), Tangent(64))).groups()[Tangent(64)]
            [0, 2]
        """
        found: dict[Smyrf | Tangent | Dense, list[int]] = {}
        for head, method in enumerate(self.methods):
            found.setdefault(method, []).append(head)
        return found

    def is_exact(self, n_queries: int, n_keys: int) -> bool:
        """Whether every head is.

        Example:
            >>> PerHead((Dense(), Tangent(1.0))).is_exact(512, 512)
            True
        """
        return all(method.is_exact(n_queries, n_keys) for method in self.methods)

    def key_visits(self, n_keys: int, n_queries: int | None = None) -> int:
        """Those of a query in the mean over the heads.

        Example:
            >>> PerHead((Tangent(64), Dense())).key_visits(512)
            288
        """
        return math.ceil(sum(method.key_visits(n_keys, n_queries) for method in self.methods) / len(self.methods))

    def memory_share(self, n_keys: int, n_queries: int | None = None) -> float:
        """Key visits as a share of all keys.

        Example:
            >>> PerHead((Tangent(64), Dense())).memory_share(512)
            0.5625
        """
        return self.key_visits(n_keys, n_queries) / n_keys


Method: TypeAlias = Smyrf | Tangent | Dense | PerHead

_KINDS: dict[str, type[Smyrf | Tangent | Dense | PerHead]] = {
    "smyrf": Smyrf,
    "tangent": Tangent,
    "dense": Dense,
    "per_head": PerHead,
}


def method_to_dict(method: Method) -> dict[str, Any]:
    """A method as JSON can hold it; `method_from_dict` is the way back.

    Example:
        >>> method_to_dict(Dense())
        {'kind': 'dense'}
        >>> method_from_dict(method_to_dict(Smyrf(4, 64))) == Smyrf(4, 64)
        True
    """
    check_method(method)
    if isinstance(method, PerHead):
        return {"kind": "per_head", "methods": [method_to_dict(one) for one in method.methods]}
    return {"kind": type(method).__name__.lower(), **asdict(method)}


def method_from_dict(data: object) -> Method:
    """The method that `method_to_dict` has written.

    Raises:
        ValueError: names what is unknown, missing or wrong.

    Example:
        >>> method_from_dict({"kind": "tangent", "budget": 0.1}).key_visits(1000)
        100
    """
    if not isinstance(data, dict) or "kind" not in data:
        raise ValueError(f"a method must be an object with a kind, not {data!r}")
    kind = data["kind"]
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"{kind=} must be one of {', '.join(_KINDS)}")
    options = {name: value for name, value in data.items() if name != "kind"}
    known = [field.name for field in fields(_KINDS[kind])]
    for name in options:
        if name not in known:
            raise ValueError(f"{kind} has no option {name!r}; it has {', '.join(known) or 'none'}")
    if kind == "per_head" and "methods" not in options:
        raise ValueError("per_head: methods missing")
    if isinstance(options.get("methods"), list):
        options["methods"] = tuple(method_from_dict(one) for one in options["methods"])
    try:
        return _KINDS[kind](**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{kind}: {error}") from error


def method_label(method: Method) -> str:
    """A short name for tables.

    Example:
        >>> method_label(Tangent(0.25)), method_label(Smyrf(4, 64)), method_label(PerHead((Tangent(64), Tangent(32))))
        ('Tangent 25%', 'Smyrf 4×64', 'Tangent 1×64 + 1×32')
    """
    if isinstance(method, PerHead):
        parts = [(len(heads), method_label(one)) for one, heads in method.groups().items()]
        if all(name.startswith("Tangent ") for _, name in parts):
            return "Tangent " + " + ".join(f"{n}×{name.removeprefix('Tangent ')}" for n, name in parts)
        return " + ".join(f"{n}×{name}" for n, name in parts)
    if isinstance(method, Tangent):
        return f"Tangent {100 * method.budget:.3g}%" if isinstance(method.budget, float) else f"Tangent {method.budget}"
    return f"Smyrf {method.n_hashes}×{method.cluster_size}" if isinstance(method, Smyrf) else "Dense"


# What `parse_method` reads, for messages and help.
GRAMMAR = (
    "dense, tangent:0.25 (share of the keys), tangent:128 (key visits) or smyrf:8x32 (rounds × cluster size), with "
    "options behind it as in tangent:0.25,levels=2"
)


def parse_method(text: str) -> Method:
    """The method that a user has typed: a kind, its size behind a colon, and options behind commas.

    Raises:
        ValueError: says what is wrong, and what can be written.

    Example:
        >>> parse_method("tangent:0.25").key_visits(512), parse_method("tangent:128,levels=2").levels
        (128, 2)
        >>> parse_method("smyrf:8x32,deduplicate=true") == Smyrf(8, 32, deduplicate=True)
        True
    """
    head, *options = text.split(",")
    kind, colon, size = head.partition(":")
    sizes = re.split("[x×]", size)
    try:
        data: dict[str, Any] = {"kind": kind}
        if kind == "tangent" and colon:
            data["budget"] = _typed_number(size)
        elif kind == "smyrf" and len(sizes) == 2:
            data["n_hashes"], data["cluster_size"] = map(_typed_number, sizes)
        elif kind != "dense" or colon:
            raise ValueError("its size is missing" if kind in ("tangent", "smyrf") else f"{head!r} is unknown")
        for option in options:
            name, equals, value = option.partition("=")
            if not equals or name in data:
                raise ValueError(f"{option!r} is given twice" if equals else f"{option!r} is not option=value")
            flags: dict[str, Any] = {"true": True, "false": False}
            data[name] = flags.get(value, _typed_number(value) if value[:1].isdecimal() else value)
        return method_from_dict(data)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a method: {error}; write {GRAMMAR}") from error


def parse_methods(text: str) -> tuple[Method, ...]:
    """Several methods behind commas, each perhaps with options behind commas of its own; each once.

    Raises:
        ValueError: says what is wrong, and what can be written.

    Example:
        >>> [method_label(method) for method in parse_methods("dense,tangent:0.125,levels=2,smyrf:64x32")]
        ['Dense', 'Tangent 12.5%', 'Smyrf 64×32']
    """
    words: list[str] = []
    for part in text.split(","):
        if "=" in part and words:
            words[-1] += f",{part}"
        else:
            words.append(part)
    return tuple(dict.fromkeys(parse_method(word) for word in words))


def _typed_number(text: str) -> float | int:
    """An int, or a float where there is a point.

    Example:
        >>> _typed_number("128"), _typed_number("1.0")
        (128, 1.0)
    """
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _check_positive(method: Method, *names: str) -> None:
    """Raises unless each argument is an int from 1, or what its default says."""
    for name in names:
        value = getattr(method, name)
        if value is None and type(method).__dataclass_fields__[name].default is None:
            continue
        if name == "budget" and isinstance(value, float):
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be an int, not {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def check_method(method: object) -> None:
    """Raises unless `method` is one of ours, with a hint if the class itself was given."""
    if isinstance(method, Smyrf | Tangent | Dense | PerHead):
        return
    if isinstance(method, type) and issubclass(method, Smyrf | Tangent | Dense | PerHead):
        raise TypeError(f"method={method!r} must be an instance: write {method.__name__}()")
    raise TypeError(f"method={method!r} must be a Smyrf, a Tangent, a Dense or a PerHead, not {type(method).__name__}")
