"""A process that runs cases of one part: ``python -m tests.attack.worker PART FOLDER``.

It reads a case on each line of standard input and answers each with a verdict, as JSON. A crash ends only this process,
and `tests.attack.pool` starts another.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

# A library to attack in place of the installed one, such as the one with sanitizers of .ci/sanitize.
LIBRARY = os.environ.get("SMYRF_NATIVE")


def load_library() -> None:
    """Load another library than the installed one, after PyTorch, whose OpenMP runtime it uses."""
    if LIBRARY:
        import torch  # noqa: F401

        spec = importlib.util.spec_from_file_location("smyrf._native", LIBRARY)
        sys.modules["smyrf._native"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["smyrf._native"])


def main() -> None:
    """Answer cases until standard input ends."""
    load_library()
    name, folder = sys.argv[1:]
    warnings.simplefilter("ignore")
    part = importlib.import_module(f"tests.attack.{name}")
    answers = os.fdopen(os.dup(1), "w")
    os.set_inheritable(answers.fileno(), False)
    os.dup2(2, 1)  # what a case prints is no answer
    if hasattr(part, "prepare"):
        part.prepare(Path(folder))
    for line in sys.stdin:
        try:
            verdict = part.check(json.loads(line))
            answer = {"failures": list(verdict.failures), "count": verdict.count, "tally": verdict.tally}
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"
            answer = {"failures": [said[:600]], "count": 1, "tally": {}}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
