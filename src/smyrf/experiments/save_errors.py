"""Errors of writing a run's files, in one sentence: a full disk must not end a run in a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smyrf.tools.error_text import first_line


class SaveError(OSError):
    """A file of a run cannot be written; the message names the folder."""


@contextmanager
def naming_folder(folder: Path, what: str) -> Iterator[None]:
    """Raise `SaveError` for errors of writing inside the block: of the system, of ``torch.save`` and of safetensors.

    Args:
        what: what is written, for the message.

    Example:
        >>> with naming_folder(Path("runs/a"), "checkpoint-2"):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        ...
        smyrf.experiments.save_errors.SaveError: runs/a: checkpoint-2 cannot be written: No space left on device; ...
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, OSError):
            reason = error.strerror or first_line(error)
        elif isinstance(error, RuntimeError):  # torch.save gives only a position in the file
            reason = "the disk may be full"
        else:
            reason = first_line(error).rpartition("I/O error: ")[-1]
        resumption = "the same command resumes from the last checkpoint"
        raise SaveError(f"{folder}: {what} cannot be written: {reason}; {resumption}") from error
