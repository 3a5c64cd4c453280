"""Methods as users type them, such as ``tangent:0.25``."""

from __future__ import annotations

from typing import Any

from smyrf.methods.base import Method
from smyrf.methods.numbers import typed_number
from smyrf.methods.registry import METHODS, method_from_dict

# What `parse_method` reads, for messages and help.
GRAMMAR = (
    "dense, tangent:0.25 (share of the keys), tangent:128 (key visits) or smyrf:8x32 (rounds × cluster size), with "
    "options after commas as in tangent:0.25,levels=2"
)
# Kinds that only JSON can describe.
NOT_TYPED = ("per_head",)


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
        if kind not in METHODS or kind in NOT_TYPED or (kind == "dense" and colon):
            raise ValueError(f"{head!r} is unknown")
        data: dict[str, Any] = {"kind": kind}
        if kind != "dense":
            if not colon:
                raise ValueError("its size is missing")
            data |= METHODS[kind].parse_size(size)
        for option in options:
            name, equals, value = option.partition("=")
            if not equals or name in data:
                raise ValueError(f"{option!r} is given twice" if equals else f"{option!r} is not option=value")
            flags: dict[str, Any] = {"true": True, "false": False}
            data[name] = flags.get(value, typed_number(value) if value[:1].isdecimal() else value)
        return method_from_dict(data)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a method: {error}; write {GRAMMAR}") from error


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
