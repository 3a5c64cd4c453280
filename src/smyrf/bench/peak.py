"""Peak memory of one call, in a fresh process: nothing else has been there, nothing stays.

The process is this module itself: ``python -m smyrf.bench.peak '{"name": …}'`` prints the bytes beyond
the inputs.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
from pathlib import Path

import torch

from smyrf.bench.cases import Problem
from smyrf.bench.contenders import contender
from smyrf.bench.timing import once
from smyrf.methods import Smyrf, Tangent, method_from_dict, method_to_dict

_STATUS = Path("/proc/self/status")


def can_measure() -> str | None:
    """None, or why peak memory cannot be measured here."""
    return None if _STATUS.exists() else "peak memory is read from /proc, which this system does not have"


def extra_bytes(name: str, problem: Problem, method: Smyrf | Tangent | None, threads: int, backend: str | None) -> int:
    """Bytes that a call of a contender needs beyond its inputs, gradients included."""
    request = json.dumps(
        {
            "name": name,
            "problem": dataclasses.asdict(problem),
            "method": None if method is None else method_to_dict(method),
            "threads": threads,
            "backend": backend,
        }
    )
    answer = subprocess.run(
        [sys.executable, "-m", "smyrf.bench.peak", request], capture_output=True, text=True, check=False
    )
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        reason = "killed, probably for want of memory" if answer.returncode < 0 else lines[-1]
        raise RuntimeError(f"measuring the memory of {name} at length {problem.length} failed: {reason}")
    return int(answer.stdout)


def _measure(request: str) -> int:
    data = json.loads(request)
    torch.set_num_threads(data["threads"])
    method = None if data["method"] is None else method_from_dict(data["method"])
    assert method is None or isinstance(method, Smyrf | Tangent)
    problem = Problem(**data["problem"])
    run = contender(data["name"], method, data["backend"])
    # A small call first: what libraries set up once belongs to no call.
    small = 4 * method.cluster_size if isinstance(method, Smyrf) else 256
    once(run, dataclasses.replace(problem, batch=1, length=min(small, problem.length)))()
    call = once(run, problem)
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


if __name__ == "__main__":
    print(_measure(sys.argv[1]))
