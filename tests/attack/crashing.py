"""A part for the tests of `tests.attack.pool`: the case "crash" ends its process."""

from __future__ import annotations

import os
import signal

from tests.attack.verdict import Case, Verdict

PROCESSES, SECONDS = 1, 60.0


def check(case: Case) -> Verdict:
    """Nothing, or a crash."""
    if case["kind"] == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return Verdict()
