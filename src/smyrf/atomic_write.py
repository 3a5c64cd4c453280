"""Files that a kill leaves as they were or as they should be, never half-written."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be renamed either
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = re.compile(r"\.smyrf-[0-9a-f]{16}\.tmp")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name in the same folder, to write to; at the end it becomes `path`, unless there was an error.

    A new file has the mode that the umask leaves, a rewritten one keeps its own. If `path` is a link, its target is
    replaced. Temporary files that killed processes left in the folder are removed first.

    Raises:
        OSError: it cannot be written, is read-only, or is a folder or a device.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder) / "a.bin") as temporary:
        ...         _ = temporary.write_bytes(b"12")
        ...     (Path(folder) / "a.bin").read_bytes(), len(list(Path(folder).iterdir()))
        (b'12', 1)
    """
    path = Path(os.path.realpath(path))
    if os.path.lexists(path) and not path.is_file():
        raise OSError(f"{path} is not a file that can be replaced")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it is read-only", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    temporary, handle = _create(path.parent, 0o666 if mode is None else 0o600)
    try:
        yield temporary
        if mode is not None:
            temporary.chmod(mode)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        if handle is not None:
            os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, with `replacing`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_text(Path(folder) / "new" / "a.md", "some × text")
        ...     print((Path(folder) / "new" / "a.md").read_text(encoding="utf-8"))
        some × text
    """
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file, with `replacing`.

    Raises:
        ValueError: a number is not finite, which JSON cannot say.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_json(Path(folder) / "a.json", {"b": 1})
        ...     print((Path(folder) / "a.json").read_text())
        {
         "b": 1
        }
        <BLANKLINE>
    """
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def _create(folder: Path, mode: int) -> tuple[Path, int | None]:
    """A new file, and a handle that holds its lock until it is closed or the process ends."""
    while True:
        path = folder / f".smyrf-{secrets.token_hex(8)}.tmp"
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        if fcntl is None:
            os.close(handle)
            return path, None
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if path.exists():
            return path, handle
        os.close(handle)  # another process took it for a leftover before it was locked


def _remove_leftovers(folder: Path) -> None:
    """Remove our temporary files that no living process has locked."""
    if fcntl is None:
        return
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid == os.geteuid():
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    finally:
        os.close(handle)
