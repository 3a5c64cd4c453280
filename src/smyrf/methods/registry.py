"""All methods by kind, and methods from JSON."""

from __future__ import annotations

from dataclasses import fields

from smyrf.methods.base import Method
from smyrf.methods.dense import Dense
from smyrf.methods.per_head import PerHead
from smyrf.methods.smyrf import Smyrf
from smyrf.methods.tangent import Tangent

METHODS: dict[str, type[Method]] = {method.kind: method for method in (Smyrf, Tangent, Dense, PerHead)}


def method_from_dict(data: object) -> Method:
    """The method that `Method.to_dict` has written.

    Raises:
        ValueError: names what is unknown, missing or wrong.

    Example:
        >>> method_from_dict({"kind": "tangent", "budget": 0.1}).key_visits(1000)
        100
        >>> method_from_dict(Smyrf(4, 64).to_dict()) == Smyrf(4, 64)
        True
    """
    if not isinstance(data, dict) or "kind" not in data:
        raise ValueError(f"a method must be an object with a kind, not {data!r}")
    kind = data["kind"]
    if not isinstance(kind, str) or kind not in METHODS:
        raise ValueError(f"{kind=} must be one of {', '.join(METHODS)}")
    method = METHODS[kind]
    options = {name: value for name, value in data.items() if name != "kind"}
    known = [field.name for field in fields(method)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise ValueError(f"{kind} has no option {name!r}; it has {', '.join(known) or 'none'}")
    try:
        return method.from_options(options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{kind}: {error}") from error


def check_method(method: object) -> None:
    """Raises unless `method` is a method, with a hint if the class itself was given.

    Example:
        >>> check_method(Dense())
    """
    if isinstance(method, Method):
        return
    if isinstance(method, type) and issubclass(method, Method):
        raise TypeError(f"method={method!r} must be an instance: write {method.__name__}()")
    known = ", ".join(one.__name__ for one in METHODS.values())
    raise TypeError(f"method={method!r} must be a method ({known}), not {type(method).__name__}")
