"""`changed`: another value of an attribute inside a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_MISSING = object()


class _Change(NamedTuple):
    """An attribute that some blocks have changed.

    Args:
        owner: held here, so that its id stays valid.
        before: its own value outside all blocks, or `_MISSING`.
        values: one per block, the last one in effect.
    """

    owner: object
    before: object
    values: list[list[object]]


_changes: dict[tuple[int, str], _Change] = {}
_lock = threading.Lock()


@contextmanager
def changed(owner: object, name: str, value: object) -> Iterator[None]:
    """Inside the block an object has another attribute; after it the one before, or none of its own.

    Blocks may be nested or overlap: of those that are open the last one entered counts.

    Example:
        >>> from types import SimpleNamespace
        >>> owner = SimpleNamespace(size=1)
        >>> with changed(owner, "size", 2):
        ...     print(owner)
        namespace(size=2)
        >>> owner
        namespace(size=1)
    """
    key, mine = (id(owner), name), [value]  # a list of one is unequal to others by identity
    with _lock:
        change = _changes.setdefault(key, _Change(owner, vars(owner).get(name, _MISSING), []))
        change.values.append(mine)
        setattr(owner, name, value)
    try:
        yield
    finally:
        with _lock:
            change.values[:] = [one for one in change.values if one is not mine]
            if not change.values:
                del _changes[key]
            now = change.values[-1][0] if change.values else change.before
            if now is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, now)


def is_changed(owner: object, name: str) -> bool:
    """Whether an attribute is changed by a block.

    Example:
        >>> is_changed(object(), "size")
        False
    """
    return (id(owner), name) in _changes
