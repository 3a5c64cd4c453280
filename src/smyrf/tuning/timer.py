"""Best time per call of several functions, measured in turn so that a slow moment of the machine hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import torch

# A call that takes longer than this is made once: a warm-up would not change it.
SLOW_SECONDS = 5.0
# A turn makes five calls, or as many as fit into this time: a call of 0.1 ms needs many to show its best.
TURN_SECONDS = 0.02


def best_times(
    calls: Mapping[str, Callable[[], object]], budget: float, prepare: Callable[[str], object] = lambda name: None
) -> Iterator[tuple[str, float]]:
    """Yield (name, best seconds so far) after each turn of a function, so that a progress bar can move.

    In a turn a function is first called once off the record, to restore its memory and caches, then a few times
    against the clock. The budget is spent whatever a call takes, so short calls are made more often.

    Args:
        budget: seconds to spend on each function.
        prepare: called with a name before each of its turns, off the clock.

    Example:
        >>> dict(best_times({"sum": lambda: sum(range(1000))}, budget=0.01))["sum"] > 0
        True
    """
    best: dict[str, float] = {}
    spent: dict[str, float] = {}
    for name, call in calls.items():
        prepare(name)
        # Not part of the budget: the first call in a process pays for what libraries set up once.
        best[name], spent[name] = _time(call), 0.0
        yield name, best[name]
    while todo := [name for name in calls if best[name] < SLOW_SECONDS and spent[name] < budget]:
        for name in todo:
            prepare(name)
            spent[name] += _time(calls[name])
            n_calls, turn = 0, 0.0
            while (n_calls < 5 or turn < TURN_SECONDS) and turn < budget / 10:  # many turns, for long calls too
                now = _time(calls[name])
                best[name] = min(best[name], now)
                n_calls, turn = n_calls + 1, turn + now
            spent[name] += turn
            yield name, best[name]


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
