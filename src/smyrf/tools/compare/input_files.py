"""Files that a user names on the command line."""

from __future__ import annotations

from pathlib import Path


class InputError(ValueError):
    """Says what is wrong with a file or folder that a user named; the handler adds the name."""


def find_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Files with one of the suffixes in a folder and its subfolders, sorted by name.

    Raises:
        InputError: it is not a folder, or has no such files.
    """
    if not folder.is_dir():
        raise InputError("it is not a folder")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
    if not found:
        raise InputError(f"it has no {', '.join(suffixes[:-1])} or {suffixes[-1]} files")
    return found
