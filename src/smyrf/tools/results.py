"""Result files: rows with the command, the commit, the machine and the configuration that produced them, as JSON."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch

import smyrf
from smyrf.atomic_write import write_json
from smyrf.backends import find_backend
from smyrf.tuning.machine import cpu


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
        "machine": environment(),
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


def environment() -> dict[str, Any]:
    """Processor, system, versions, commit, and the default backend."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "smyrf": smyrf.__version__,
        "rich": version("rich"),
        "commit": _commit(),
        "backend": find_backend(None, torch.device("cpu")).name,
    }


def machine_line(threads: int) -> str:
    """Processor and threads, for titles."""
    return f"{cpu()}, {threads} thread{'s' * (threads > 1)}"


@lru_cache
def _commit() -> str | None:
    """Commit of the running source tree, with "+" if it has changes; None for an installed package.

    Cached: a tree that changes later is not the one that was loaded.
    """
    here = Path(__file__).parent
    try:
        sha = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "."], cwd=here, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return sha + ("+" if dirty else "")
