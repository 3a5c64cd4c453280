"""JSON files that a kill leaves as they were or as they should be, never half-written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Any) -> None:
    """Writes under a temporary name of its own in the same folder, then renames.

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
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as temporary:
        try:
            temporary.write(json.dumps(data, indent=1, allow_nan=False) + "\n")
        except BaseException:
            os.unlink(temporary.name)
            raise
    os.chmod(temporary.name, 0o644)  # a temporary file is its owner's alone
    os.replace(temporary.name, path)
