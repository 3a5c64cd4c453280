"""Result files: rows with the command, the commit, the machine and the configuration that produced them, as JSON."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from smyrf.atomic_write import write_json
from smyrf.tuning.machine import cpu, machine


def write_results(
    path: Path,
    rows: list[dict[str, Any]],
    *,
    threads: int,
    config: dict[str, Any],
    also: dict[str, Any] | None = None,
) -> None:
    """Write rows with what is needed to repeat them, atomically: a kill leaves the old file or the new one.

    Args:
        threads: CPU threads used.
        also: further fields, computed from all rows together.
    """
    data = {
        "command": command_line(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "threads": threads,
        "machine": machine(),
        "config": config,
        "results": rows,
        **(also or {}),
    }
    write_json(path, data)


def command_line() -> str:
    """The running command as it would be typed: `smyrf …`, or `python script.py …` for a script."""
    program, *arguments = sys.argv
    is_script = program.endswith(".py") and Path(program).name != "__main__.py"
    return shlex.join([*(["python", program] if is_script else ["smyrf"]), *arguments])


def machine_line(threads: int) -> str:
    """Processor and threads, for titles."""
    return f"{cpu()}, {threads} thread{'s' * (threads > 1)}"
