"""Peak memory of a call in a fresh process, where nothing ran before it.

The process runs a module that measures itself: ``python -m module request`` prints the bytes that `peak_bytes` finds.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

_STATUS = Path("/proc/self/status")


def can_measure() -> str | None:
    """None, or why peak memory cannot be measured here."""
    return None if _STATUS.exists() else "peak memory is read from /proc, which this system does not have"


def ask(module: str, request: str, what: str, environment: Mapping[str, str] | None = None) -> int:
    """Run a module in a fresh process and return the bytes that it prints.

    Args:
        module: its name.
        request: its only argument.
        what: what is measured, for errors.
        environment: additional environment variables.

    Raises:
        RuntimeError: says what was measured and why that failed.
    """
    answer = subprocess.run(
        [sys.executable, "-m", module, request],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        reason = "killed, probably out of memory" if answer.returncode < 0 else lines[-1]
        raise RuntimeError(f"measuring the memory of {what} failed: {reason}")
    return int(answer.stdout)


def peak_bytes(call: Callable[[], object]) -> int:
    """Peak memory of a call beyond what the process uses before it, in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no field {field}")
