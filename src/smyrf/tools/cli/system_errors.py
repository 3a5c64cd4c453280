"""Errors of the system, such as a full disk or too little memory: one sentence instead of a traceback."""

from __future__ import annotations

import errno
from typing import Any

import typer.core

from smyrf.tools.cli.validation import refuse


class Commands(typer.core.TyperGroup):
    """A group whose commands end with one sentence if the system refuses a file or memory."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno in (None, errno.EPIPE):  # the latter ends a command that is piped into another
                raise
            where = "" if error.filename is None else f"{error.filename}: "
            refuse(f"{where}{error.strerror}")
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # what PyTorch says
                raise
            refuse("there is not enough memory for these sizes")
