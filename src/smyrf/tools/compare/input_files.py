"""Files that a user names."""

from __future__ import annotations

from pathlib import Path


class InputError(ValueError):
    """What is wrong with the file or the folder that a user has named; whoever catches it knows its name."""


def find_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Files with one of the suffixes in a folder and below it, by name.

    Raises:
        InputError: it is not a folder, or has no such files.
    """
    if not folder.is_dir():
        raise InputError("it is not a folder")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
    if not found:
        raise InputError(f"it has no {', '.join(suffixes[:-1])} or {suffixes[-1]} files")
    return found
