"""Numbers as users type them."""

from __future__ import annotations


def typed_number(text: str) -> float | int:
    """An int, or a float if the text has a point.

    Example:
        >>> typed_number("128"), typed_number("1.0")
        (128, 1.0)
    """
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
