"""Checkpoints of a run: folders named ``checkpoint-<step>``."""

from __future__ import annotations

from pathlib import Path

_PREFIX = "checkpoint-"


def checkpoint_folders(folder: Path) -> list[Path]:
    """Checkpoints in a folder, by step.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     for last in ("5", "10", "10.tmp"):
        ...         (Path(name) / f"checkpoint-{last}").mkdir()
        ...     [path.name for path in checkpoint_folders(Path(name))]
        ['checkpoint-5', 'checkpoint-10']
    """
    found = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(found, key=checkpoint_step)


def checkpoint_step(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(_PREFIX))
