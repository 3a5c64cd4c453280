"""The standing attack: fuzzing, misuse, damaged files, kills and full disks (``python -m tests.attack``)."""

from __future__ import annotations

import importlib
from types import ModuleType

# Cases of each part; None for all that it has.
PARTS: dict[str, int | None] = {"fuzz": 20_000, "misuse": None, "files": None, "kills": None, "disk": None}


def load_part(name: str) -> ModuleType:
    """The module of a part: `cases`, `check`, `PROCESSES` and `SECONDS`, and perhaps `prepare`."""
    return importlib.import_module(f"tests.attack.{name}")
