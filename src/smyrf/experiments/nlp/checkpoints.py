"""Checkpoints of a run: which is the last whole one, and which are half-written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

# transformers writes a checkpoint file by file under its final name; these files come last, one of each process.
_WHOLE = "whole-{rank}-of-{n}"


class MarkWhole(TrainerCallback):  # type: ignore[misc]
    """Marks each checkpoint once it is written."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        mark = _WHOLE.format(rank=args.process_index, n=args.world_size)
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / mark).touch()


def last_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint of a run, or None.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     for step in (5, 10, 15):
        ...         (Path(name) / f"checkpoint-{step}").mkdir()
        ...     for mark in ("checkpoint-5/whole-0-of-1", "checkpoint-10/whole-0-of-1", "checkpoint-15/whole-0-of-2"):
        ...         (Path(name) / mark).touch()
        ...     last_checkpoint(Path(name)).name
        'checkpoint-10'
    """
    return max(filter(_is_whole, _checkpoints(folder)), key=_step, default=None)


def n_marks(checkpoint: Path) -> int:
    """Processes that a whole checkpoint was written by."""
    return len(list(checkpoint.glob(_WHOLE.format(rank="*", n="*"))))


def remove_half_written(folder: Path) -> None:
    """Removes what a kill has left: transformers would count it among those that it keeps."""
    for one in _checkpoints(folder):
        if not _is_whole(one):
            shutil.rmtree(one)


def remove_all(folder: Path) -> None:
    """Removes the checkpoints of a run that is finished."""
    for one in _checkpoints(folder):
        shutil.rmtree(one)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _is_whole(checkpoint: Path) -> bool:
    marks = [mark.name for mark in checkpoint.glob(_WHOLE.format(rank="*", n="*"))]
    return bool(marks) and len(marks) == int(marks[0].rsplit("-", 1)[-1])


def _checkpoints(folder: Path) -> list[Path]:
    return [one for one in folder.glob("checkpoint-*") if one.name.removeprefix("checkpoint-").isdecimal()]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))
