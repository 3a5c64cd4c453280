"""Validation of run descriptions, and error messages in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def known_fields(kind: type[Any], data: object, what: str) -> dict[str, Any]:
    """Check that JSON data holds only fields of a dataclass, and return them.

    Args:
        what: name of the data in error messages.

    Raises:
        ValueError: the data are not an object, or have an unknown field.

    Example:
        >>> from smyrf import Smyrf
        >>> known_fields(Smyrf, {"n_hashes": 4}, "a method")
        {'n_hashes': 4}
    """
    if not isinstance(data, dict):
        raise ValueError(f"{what} must be an object, not {data!r}")
    known = {one.name for one in fields(kind)}
    for name in data:
        if name not in known:
            raise ValueError(f"{what} has no {name!r}")
    return dict(data)


def check_ints(record: object, least: Mapping[str, int]) -> None:
    """Raise unless each named attribute is an int and at least its minimum.

    Example:
        >>> from smyrf import Smyrf
        >>> check_ints(Smyrf(4, 32), {"n_hashes": 1})
    """
    for name, smallest in least.items():
        value = getattr(record, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be an int")
        if value < smallest:
            raise ValueError(f"{name}={value} must be at least {smallest}")


def check_between(record: object, names: tuple[str, ...], most: float, *, zero: bool) -> None:
    """Raise unless each named attribute is a number in (0, most], or in [0, most) if `zero` is set.

    Example:
        >>> from smyrf import Tangent
        >>> check_between(Tangent(0.5), ("budget",), 1.0, zero=False)
    """
    for name in names:
        value = getattr(record, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if zero and not (is_number and 0.0 <= value < most):
            raise ValueError(f"{name}={value!r} must be in [0, {most:g})")
        if not zero and not (is_number and 0.0 < value <= most):
            raise ValueError(f"{name}={value!r} must be positive, and at most {most:g}")
