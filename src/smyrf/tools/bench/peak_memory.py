"""Peak memory of one attention call, in a fresh process.

The process is this module itself: ``python -m smyrf.tools.bench.peak_memory '{"name": …}'`` prints the bytes beyond
the inputs.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch

from smyrf.methods import Smyrf, Tangent, method_from_dict
from smyrf.tools.bench.cases import Problem
from smyrf.tools.bench.contenders import contender
from smyrf.tools.bench.subprocess_memory import ask, peak_bytes
from smyrf.tools.bench.timing import once


def extra_bytes(name: str, problem: Problem, method: Smyrf | Tangent | None, threads: int, backend: str | None) -> int:
    """Bytes that a call of a contender needs beyond its inputs, gradients included."""
    request = json.dumps(
        {
            "name": name,
            "problem": dataclasses.asdict(problem),
            "method": None if method is None else method.to_dict(),
            "threads": threads,
            "backend": backend,
        }
    )
    return ask("smyrf.tools.bench.peak_memory", request, f"{name} at length {problem.length}")


def _measure(request: str) -> int:
    data = json.loads(request)
    torch.set_num_threads(data["threads"])
    method = None if data["method"] is None else method_from_dict(data["method"])
    assert method is None or isinstance(method, Smyrf | Tangent)
    problem = Problem(**data["problem"])
    run = contender(data["name"], method, data["backend"])
    # A small call first: what libraries set up once belongs to no call.
    if isinstance(method, Tangent):
        small = 2 * method.key_visits(problem.length)  # it would be dense attention at a shorter length
    else:
        small = 256 if method is None else 4 * method.cluster_size
    once(run, dataclasses.replace(problem, batch=1, length=min(small, problem.length)))()
    return peak_bytes(once(run, problem))


if __name__ == "__main__":
    print(_measure(sys.argv[1]))
