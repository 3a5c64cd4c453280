"""Checkpoints of a fine-tuning run: marking them as complete, and finding the last complete one."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from smyrf.experiments.checkpoint_folders import checkpoint_folders
from smyrf.experiments.run_lock import LOCK
from smyrf.experiments.save_errors import naming_folder

# transformers writes a checkpoint file by file under its final name; each process adds this mark at the end.
_WHOLE = "whole-{rank}-of-{n}"


class MarkWhole(TrainerCallback):  # type: ignore[misc]
    """Mark each checkpoint once it is complete."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        mark = _WHOLE.format(rank=args.process_index, n=args.world_size)
        folder, name = Path(args.output_dir), f"checkpoint-{state.global_step}"
        with naming_folder(folder, name):
            (folder / name / mark).touch()


def last_checkpoint(folder: Path) -> Path | None:
    """Last complete checkpoint of a run, or None.

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
    return next(filter(_is_whole, reversed(checkpoint_folders(folder))), None)


def n_marks(checkpoint: Path) -> int:
    """Number of processes that wrote a complete checkpoint."""
    return len(_marks(checkpoint))


def remove_half_written(folder: Path) -> None:
    """Remove incomplete checkpoints, which transformers would count among those that it keeps."""
    for one in checkpoint_folders(folder):
        if not _is_whole(one):
            shutil.rmtree(one)


def remove_all(folder: Path) -> None:
    """Remove the checkpoints of a finished run, and its lock."""
    for one in checkpoint_folders(folder):
        shutil.rmtree(one)
    with suppress(OSError):  # there is none, or the system keeps it while it is held
        (folder / LOCK).unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _is_whole(checkpoint: Path) -> bool:
    marks = _marks(checkpoint)
    return bool(marks) and len(marks) == int(marks[0].rsplit("-", 1)[-1])


def _marks(checkpoint: Path) -> list[str]:
    return [mark.name for mark in checkpoint.glob(_WHOLE.format(rank="*", n="*"))]
