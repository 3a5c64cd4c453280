"""Times of dense attention and of a method on a call: measured once, then kept in memory and on disk.

The file is ``crossover.json`` in `cache_folder`. A file that cannot be read counts as empty, an entry that is not two
times is ignored, and a file that cannot be written is skipped.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from smyrf.atomic_write import write_json
from smyrf.call import Call
from smyrf.methods import Dense, Method
from smyrf.models.calls import serve
from smyrf.tuning.machine import cache_folder, machine_summary
from smyrf.tuning.timer import best_times

# Duration of one comparison.
TIMING_SECONDS = 0.3
# By machine and case.
_remembered: dict[str, Timing] = {}


class Timing(NamedTuple):
    """Seconds per call, the best of several.

    Example:
        >>> Timing(dense=0.3, method=0.1).speedup
        3.0
    """

    dense: float
    method: float

    @property
    def speedup(self) -> float:
        """Speed-up over dense attention."""
        return round(self.dense / self.method, 12)


def timing(call: Call, method: Method, backend: str | None = None) -> Timing:
    """Times of dense attention and of a method on a call, from memory, from disk, or measured in turns.

    Args:
        backend: for the method; dense attention is always PyTorch's function.

    Example:
        >>> x = torch.randn(1, 1, 8, 4)
        >>> timing(Call(x, x, x, 0.5), Dense()).speedup  # nothing to measure
        1.0
    """
    if call.plan(method).is_exact:
        return Timing(1.0, 1.0)
    key = f"{machine_summary(backend)} | {_case(call, method)}"
    if key not in _remembered:
        _remembered.update({other: found for other, found in _read().items() if other not in _remembered})
    if key not in _remembered:
        _remembered[key] = _measure(call, method, backend)
        _write(_read() | {key: _remembered[key]})
    return _remembered[key]


def _measure(call: Call, method: Method, backend: str | None) -> Timing:
    with torch.no_grad():
        calls = {
            "dense": lambda: serve(call, Dense(), generator=0),
            "method": lambda: serve(call, method, generator=0, backend=backend),
        }
        best = dict(best_times(calls, TIMING_SECONDS / 2))
    return Timing(best["dense"], best["method"])


def _case(call: Call, method: Method) -> str:
    """Everything in a call that its time depends on, except for the numbers in its tensors."""
    q, k, v = (tuple(x.shape) for x in (call.q, call.k, call.v))
    flags = " causal" * call.is_causal + " masked" * (call.key_mask is not None)
    device = torch.cuda.get_device_name(call.q.device) if call.q.is_cuda else call.q.device.type
    return f"{device} {call.q.dtype} {q} {k} {v}{flags} | {json.dumps(method.to_dict(), sort_keys=True)}"


def _file() -> Path:
    return cache_folder() / "crossover.json"


def _read() -> dict[str, Timing]:
    try:
        data = json.loads(_file().read_text(), parse_int=float)  # an integer may be too large for a float
    except (OSError, ValueError, RecursionError):
        return {}
    entries = data.items() if isinstance(data, dict) else ()
    return {key: Timing(*times) for key, times in entries if _are_times(times)}


def _are_times(found: object) -> bool:
    """Whether an entry holds two times in seconds; a quotient of those beyond the bounds may overflow."""
    return (
        isinstance(found, list)
        and len(found) == 2
        and all(isinstance(time, float) and 1e-12 < time < 1e12 for time in found)
    )


def _write(timings: dict[str, Timing]) -> None:
    with suppress(OSError):
        write_json(_file(), timings)
