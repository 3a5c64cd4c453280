"""Where a method is faster than dense attention on this machine: measured once, remembered in memory and on disk.

The file is ``crossover.json`` in ``$SMYRF_CACHE``, or else in ``smyrf`` under ``$XDG_CACHE_HOME`` or ``~/.cache``.
A file that cannot be read counts as empty, and one that cannot be written is done without.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

import smyrf
from smyrf.atomic_write import write_json
from smyrf.attention import attention
from smyrf.backends import best_backend
from smyrf.methods import Dense, Method
from smyrf.call import Call

# Seconds that a comparison takes.
TIMING_SECONDS = 0.3
# By machine and case.
_remembered: dict[str, Timing] = {}


class Timing(NamedTuple):
    """Seconds per call, best of several.

    Example:
        >>> Timing(dense=0.3, method=0.1).speedup
        3.0
    """

    dense: float
    method: float

    @property
    def speedup(self) -> float:
        """How many times faster than dense attention."""
        return round(self.dense / self.method, 12)


def timing(call: Call, method: Method) -> Timing:
    """How long dense attention and a method take on a call, from memory, from disk, or measured in turn.

    Example:
        >>> x = torch.randn(1, 1, 8, 4)
        >>> timing(Call(x, x, x, 0.5), Dense()).speedup  # nothing to measure
        1.0
    """
    if method.is_exact(call.n_queries, call.n_keys):
        return Timing(1.0, 1.0)
    key = f"{machine()} | {_case(call, method)}"
    if key not in _remembered:
        _remembered.update({other: found for other, found in _read().items() if other not in _remembered})
    if key not in _remembered:
        _remembered[key] = _measure(call, method)
        _write(_read() | {key: _remembered[key]})
    return _remembered[key]


def machine() -> str:
    """What a time depends on besides the call: processor, threads, versions, kernel.

    Example:
        >>> "smyrf" in machine()
        True
    """
    threads = torch.get_num_threads()
    kernel = best_backend(torch.device("cpu"))
    versions = f"torch {torch.__version__}, smyrf {smyrf.__version__}"
    return f"{cpu()}, {threads} thread{'s' * (threads > 1)}, {versions}, {kernel} kernel"


@lru_cache
def cpu() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def cache_file() -> Path:
    """Where times are kept."""
    if folder := os.environ.get("SMYRF_CACHE"):
        return Path(folder) / "crossover.json"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "smyrf" / "crossover.json"


def best_seconds(calls: Mapping[str, Callable[[], object]], budget: float = TIMING_SECONDS) -> dict[str, float]:
    """Best time of each, all in turn, so that a slow moment of the machine hits all alike.

    Args:
        budget: seconds to spend on all together, two rounds at least unless they are slow.

    Example:
        >>> best_seconds({"sum": lambda: sum(range(1000))}, budget=0.01)["sum"] > 0
        True
    """
    best = dict.fromkeys(calls, float("inf"))
    start, rounds, spent = time.perf_counter(), 0, 0.0
    while spent < budget or (rounds < 2 and spent < 4 * budget):
        for name, call in calls.items():
            for _ in range(2):  # the first finds memory and caches as the others have left them
                before = time.perf_counter()
                call()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                best[name] = min(best[name], time.perf_counter() - before)
        rounds, spent = rounds + 1, time.perf_counter() - start
    return best


def _measure(call: Call, method: Method) -> Timing:
    def run(one: Method) -> None:
        with torch.no_grad():
            attention(
                call.q,
                call.k,
                call.v,
                method=one,
                key_mask=call.key_mask,
                is_causal=call.is_causal,
                scale=call.scale,
                enable_gqa=True,
                generator=0,
            )

    best = best_seconds({"dense": lambda: run(Dense()), "method": lambda: run(method)})
    return Timing(best["dense"], best["method"])


def _case(call: Call, method: Method) -> str:
    """All of a call that its time depends on, but for the numbers in it."""
    q, k, v = (tuple(x.shape) for x in (call.q, call.k, call.v))
    flags = " causal" * call.is_causal + " masked" * (call.key_mask is not None)
    device = torch.cuda.get_device_name(call.q.device) if call.q.is_cuda else call.q.device.type
    return f"{device} {call.q.dtype} {q} {k} {v}{flags} | {json.dumps(method.to_dict(), sort_keys=True)}"


def _read() -> dict[str, Timing]:
    try:
        data = json.loads(cache_file().read_text())
        found = {str(key): Timing(float(dense), float(method)) for key, (dense, method) in data.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
    return {key: one for key, one in found.items() if one.dense > 0 and one.method > 0}


def _write(timings: dict[str, Timing]) -> None:
    file = cache_file()
    with suppress(OSError):
        write_json(file, timings)
