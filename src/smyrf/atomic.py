"""Files that a kill leaves as they were or as they should be, never half-written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes under a temporary name of its own in the same folder, then renames.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_text(Path(folder) / "new" / "a.md", "some × text")
        ...     print((Path(folder) / "new" / "a.md").read_text(encoding="utf-8"))
        some × text
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name, folder = path.name, path.parent
    with tempfile.NamedTemporaryFile("wb", dir=folder, prefix=name, suffix=".tmp", delete=False) as temporary:
        temporary.write(text.encode())
    os.chmod(temporary.name, 0o644)  # a temporary file is its owner's alone
    os.replace(temporary.name, path)


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
