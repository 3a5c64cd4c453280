"""Peak memory of one attention call, in a fresh process.

The process runs this module: ``python -m smyrf.tools.bench.peak_memory '{"name": …}'`` prints the bytes beyond the
inputs.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch

from smyrf.methods import Method, method_from_dict
from smyrf.tools.bench.baselines import BASELINES, DENSE, SDPA, attention_function
from smyrf.tools.bench.problems import Problem
from smyrf.tools.subprocess_memory import ask, peak_bytes


def extra_bytes(name: str, problem: Problem, method: Method | None, threads: int, backend: str | None) -> int:
    """Peak memory of a call beyond its inputs, in bytes, gradients included."""
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
    problem = Problem(**data["problem"])
    # A small call first, so that what libraries set up once is not counted.
    if data["name"] in BASELINES or method is None:
        small, warm_up = 256, attention_function(SDPA if data["name"] == SDPA else DENSE, None)
    else:
        small, warm_up = problem.length, attention_function(data["name"], method, data["backend"])
        while small % 2 == 0 and not method.is_exact(small // 2, small // 2):  # a shorter one would be dense attention
            small //= 2
    dataclasses.replace(problem, batch=1, length=min(small, problem.length)).bind(warm_up)()
    return peak_bytes(problem.bind(attention_function(data["name"], method, data["backend"])))


if __name__ == "__main__":
    print(_measure(sys.argv[1]))
