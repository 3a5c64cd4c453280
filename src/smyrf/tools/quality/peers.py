"""Methods from outside the package to compare with, loaded from a path.

A peers file is a Python module, or a folder with an ``__init__.py``. It is executed, so load only files that you
trust. It defines ``peers(budget, n_keys, n_queries) -> dict[str, Peer]``: methods by name, for a budget in key visits
per query.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

Run: TypeAlias = Callable[[Tensor, Tensor, Tensor, float, int], Tensor]


@dataclass(frozen=True)
class Peer:
    """A method that is not ours.

    Args:
        run: ``(q, k, v, scale, seed) -> out`` on ``(batch, heads, N, D)``, differentiable.
        key_visits: keys that a query is compared with, including all passes over centroids; a visit is one
            score and one row of values.
        settings: its sizes for the budget, for the result file.
    """

    run: Run
    key_visits: float
    settings: dict[str, int]


class PeerError(Exception):
    """A peers file, or a method in it, does not work."""


PeersOf: TypeAlias = Callable[[int, int, int], dict[str, Peer]]


def load_peers(path: Path) -> PeersOf:
    """The function `peers` of a Python file, or of a folder with an ``__init__.py``.

    Raises:
        PeerError: if it cannot be imported or has no such function.
    """
    file = path / "__init__.py" if path.is_dir() else path
    if not file.is_file():
        raise PeerError("neither a Python file nor a folder with an __init__.py")
    name = f"smyrf_peers_{path.resolve().stem}"
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(path)] if path.is_dir() else None
    )
    if spec is None or spec.loader is None:
        raise PeerError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # relative imports inside a folder look here
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # foreign code may raise anything
        del sys.modules[name]
        raise PeerError(f"cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, "peers", None)
    if not callable(found):
        raise PeerError("does not define peers(budget, n_keys, n_queries)")
    return found
