"""Methods as users type them, such as ``tangent:0.25``."""

from __future__ import annotations

from typing import Any

from smyrf.methods.base import Method
from smyrf.methods.numbers import typed_number
from smyrf.methods.registry import METHODS, method_from_dict


def parse_method(text: str) -> Method:
    """The method that a user has typed: a kind, its size after a colon, options after commas.

    Raises:
        ValueError: says what is wrong, and what can be written.

    Example:
        >>> parse_method("tangent:0.25").key_visits(512), parse_method("tangent:128,levels=2").levels
        (128, 2)
        >>> parse_method("smyrf:8x32,deduplicate=true").label
        'Smyrf 8×32, pairs once'
    """
    head, *options = text.split(",")
    kind, colon, size = head.partition(":")
    try:
        if kind not in METHODS or not METHODS[kind].typed:
            raise ValueError(f"{head!r} is unknown")
        if colon and not size:
            raise ValueError("its size is missing")
        data: dict[str, Any] = {"kind": kind, **METHODS[kind].parse_size(size)}
        for option in options:
            name, equals, value = option.partition("=")
            if not equals or name in data:
                raise ValueError(f"{option!r} is given twice" if equals else f"{option!r} is not option=value")
            flags: dict[str, Any] = {"true": True, "false": False}
            data[name] = flags.get(value, typed_number(value) if value[:1].isdecimal() else value)
        return method_from_dict(data)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a method: {error}; write {_forms()}") from error


def _forms() -> str:
    """All forms that can be typed, for messages."""
    forms = [method.typed for method in reversed(METHODS.values()) if method.typed]  # the simplest first
    return f"{', '.join(forms[:-1])} or {forms[-1]}, with options after commas as in tangent:0.25,levels=2"


def parse_methods(text: str) -> tuple[Method, ...]:
    """Several methods, separated by commas, each with its own options after commas; duplicates are dropped.

    Raises:
        ValueError: says what is wrong, and what can be written.

    Example:
        >>> [method.label for method in parse_methods("dense,tangent:0.125,levels=2,smyrf:64x32")]
        ['Dense', 'Tangent 12.5%, 2 levels', 'Smyrf 64×32']
    """
    words: list[str] = []
    for part in text.split(","):
        if "=" in part and words:
            words[-1] += f",{part}"
        else:
            words.append(part)
    return tuple(dict.fromkeys(parse_method(word) for word in words))
