"""Rank and number of processes, as set by ``torchrun`` and ``accelerate launch``."""

from __future__ import annotations

import os


def n_processes() -> int:
    """Number of processes in this run.

    Example:
        >>> n_processes()
        1
    """
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this process is the one that prints and writes files.

    Example:
        >>> is_first_process()
        True
    """
    return int(os.environ.get("RANK", "0")) == 0
