"""Seconds per call, of all contenders in turn, so that a slow moment of the machine hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from smyrf.tools.bench.cases import Problem
from smyrf.tools.bench.contenders import Contender

# A call that takes longer than this is run once: a warm-up would not change it.
SLOW_SECONDS = 5.0
# A turn has five calls, and short ones as many as fit into this: a call of 0.1 ms needs many to show its best.
TURN_SECONDS = 0.02


def once(run: Contender, problem: Problem) -> Callable[[], None]:
    """One call as a function without arguments: forward, or forward and backward."""
    q, k, v = problem.inputs()

    def forward() -> None:
        with torch.no_grad():
            run(q, k, v)

    def both() -> None:
        out = run(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    return both if problem.backward else forward


def seconds(
    calls: dict[str, Callable[[], None]], budget: float, prepare: Callable[[str], object] = lambda name: None
) -> Iterator[tuple[str, float]]:
    """Best times. Yields (name, seconds) after each turn of a contender, so that a bar can move.

    In a turn a contender is called once to find its memory and caches as it would leave them, then a few
    times against the clock. The budget is spent whatever a call takes, so that short ones are called more often.

    Args:
        budget: seconds to spend on each contender.
        prepare: is called with the name of a contender before its turn, off the clock.
    """
    best: dict[str, float] = {}
    spent: dict[str, float] = {}
    for name, call in calls.items():
        prepare(name)
        # Not part of the budget: whoever is called first in a process pays for what libraries set up once.
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


def _time(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
