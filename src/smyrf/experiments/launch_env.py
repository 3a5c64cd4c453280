"""Which of several processes this is, as ``torchrun`` and ``accelerate launch`` say it."""

from __future__ import annotations

import os


def n_processes() -> int:
    """Processes of this run.

    Example:
        >>> n_processes()
        1
    """
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this process is the one that prints and writes.

    Example:
        >>> is_first_process()
        True
    """
    return int(os.environ.get("RANK", "0")) == 0
