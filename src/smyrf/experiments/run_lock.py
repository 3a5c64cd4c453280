"""A lock on the folder of a run: no two processes train in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "run.lock"


class LockedError(ValueError):
    """Another process is training in the same folder; the message names it."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock on a folder. The system releases it when the process ends, even if it is killed.

    Raises:
        LockedError: another process holds it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name, run_lock(Path(name)):
        ...     with run_lock(Path(name)):  # doctest: +IGNORE_EXCEPTION_DETAIL
        ...         pass
        Traceback (most recent call last):
        ...
        LockedError: another process is training in ...
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise LockedError(f"another process is training in {folder}") from error
    try:
        yield
    finally:
        lock.release()
