"""`PerHead`: a method for each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from smyrf.methods.base import Layout, Method, mean_visits


@dataclass(frozen=True)
class PerHead(Method):
    """A method for each query head: heads differ in how much of their attention lies outside a few keys.

    Args:
        methods: one per head; heads with equal methods run together.

    Example:
        >>> from smyrf.methods import Dense, Tangent
        >>> method = PerHead((Tangent(64), Tangent(128), Tangent(64), Dense()))
        >>> method.key_visits(512), method.memory_share(512)
        (192, 0.375)
    """

    kind: ClassVar[str] = "per_head"

    methods: tuple[Method, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.methods, tuple) or not self.methods:
            raise TypeError(f"methods={self.methods!r} must be a tuple with a method for each head")
        for method in self.methods:
            if not isinstance(method, Method) or isinstance(method, PerHead):
                raise TypeError(f"methods must hold methods for single heads, such as Tangent(64), not {method!r}")

    @property
    def is_random(self) -> bool:  # type: ignore[override]
        return any(method.is_random for method in self.methods)

    @property
    def has_far_keys(self) -> bool:  # type: ignore[override]
        return any(method.has_far_keys for method in self.methods)

    @property
    def is_dense(self) -> bool:  # type: ignore[override]
        return all(method.is_dense for method in self.methods)

    def groups(self) -> dict[Method, list[int]]:
        """The heads of each method.

        Example:
            >>> from smyrf.methods import Dense, Tangent
            >>> PerHead((Tangent(64), Dense(), Tangent(64))).groups()[Tangent(64)]
            [0, 2]
        """
        found: dict[Method, list[int]] = {}
        for head, method in enumerate(self.methods):
            found.setdefault(method, []).append(head)
        return found

    def _plan(self, n_queries: int, n_keys: int) -> Layout:
        layouts = [method.plan(n_queries, n_keys) for method in self.methods]
        visits = mean_visits([layout.key_visits for layout in layouts])  # averaged over heads
        return Layout(n_queries, n_keys, is_exact=all(one.is_exact for one in layouts), key_visits=visits)

    @property
    def label(self) -> str:
        """Number of heads and label of each method.

        Example:
            >>> from smyrf.methods import Dense, Tangent
            >>> PerHead((Tangent(64), Tangent(32))).label, PerHead((Tangent(64), Dense())).label
            ('Tangent 1×64 + 1×32', '1×Tangent 64 + 1×Dense')
        """
        parts = [(len(heads), method) for method, heads in self.groups().items()]
        names = {type(method).__name__ for _, method in parts}
        if len(names) == 1 and all(method.size_label for _, method in parts):
            (name,) = names
            return f"{name} " + " + ".join(f"{n}×{method.label.removeprefix(f'{name} ')}" for n, method in parts)
        return " + ".join(f"{n}×{method.label}" for n, method in parts)

    def to_dict(self) -> dict[str, Any]:
        """The method as JSON; `method_from_dict` reads it."""
        return {"kind": self.kind, "methods": [method.to_dict() for method in self.methods]}

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Method:
        """The method from the options that `to_dict` writes beside its kind."""
        from smyrf.methods.registry import method_from_dict

        if "methods" not in options:
            raise ValueError("methods missing")
        methods = options["methods"]
        return cls(tuple(method_from_dict(one) for one in methods) if isinstance(methods, list) else methods)
