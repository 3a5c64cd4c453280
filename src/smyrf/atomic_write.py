"""Files that a kill leaves as they were or as they should be, never half-written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name in the same folder, to write to; at the end it becomes `path`, unless there was an error.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder) / "a.bin") as temporary:
        ...         _ = temporary.write_bytes(b"12")
        ...     (Path(folder) / "a.bin").read_bytes(), len(list(Path(folder).iterdir()))
        (b'12', 1)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)  # a temporary file can be read only by its owner
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name in the same folder, then renames.

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
    """Writes JSON, as `write_text` does.

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
