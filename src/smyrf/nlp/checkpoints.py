"""Checkpoints of a run: which is the last whole one, and which are half-written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

# transformers writes a checkpoint file by file under its final name; this file comes last, when all others are there.
WHOLE = "whole"


class MarkWhole(TrainerCallback):
    """Marks each checkpoint once it is written."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / WHOLE).touch()


def last_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint of a run, or None.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     for step in (5, 10, 15):
        ...         (Path(name) / f"checkpoint-{step}").mkdir()
        ...     for step in (5, 10):
        ...         (Path(name) / f"checkpoint-{step}" / WHOLE).touch()
        ...     last_checkpoint(Path(name)).name
        'checkpoint-10'
    """
    whole = [one for one in _checkpoints(folder) if (one / WHOLE).exists()]
    return max(whole, key=_step, default=None)


def remove_half_written(folder: Path) -> None:
    """Removes what a kill has left: transformers would count it among those that it keeps."""
    for one in _checkpoints(folder):
        if not (one / WHOLE).exists():
            shutil.rmtree(one)


def remove_all(folder: Path) -> None:
    """Removes the checkpoints of a run that is finished."""
    for one in _checkpoints(folder):
        shutil.rmtree(one)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _checkpoints(folder: Path) -> list[Path]:
    return [one for one in folder.glob("checkpoint-*") if one.name.removeprefix("checkpoint-").isdecimal()]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))
