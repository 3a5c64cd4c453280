"""Progress of long loops: a bar in a terminal, one line elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import rich.progress
from rich.console import Console

T = TypeVar("T")


def track(sequence: Iterable[T], description: str, *, total: int, console: Console) -> Iterable[T]:
    """The items of a sequence, with a bar that moves as they are taken; where there is no terminal, one line.

    Example:
        >>> import sys
        >>> sum(track([1, 2], "adding", total=2, console=Console(file=sys.stdout)))
        adding …
        3
    """
    if console.is_terminal:
        return rich.progress.track(sequence, description, total=total, console=console, transient=True)
    console.print(f"{description} …", highlight=False)
    return sequence
