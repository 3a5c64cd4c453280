"""Seconds per call, of all contenders in turn, so that a slow moment of the machine hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from smyrf.bench.cases import Problem
from smyrf.bench.contenders import Contender

# A call that takes longer than this is run once: a warm-up would not change it.
SLOW_SECONDS = 5.0


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
    calls: dict[str, Callable[[], None]], budget: float = 1.5, prepare: Callable[[str], object] = lambda name: None
) -> Iterator[tuple[str, float]]:
    """Best times. Yields (name, seconds) after each turn of a contender, so that a bar can move.

    In a turn a contender is called once to find its memory and caches as it would leave them, then a few
    times against the clock.

    Args:
        budget: seconds to spend on each contender.
        prepare: is called with the name of a contender before its turn, off the clock.
    """
    best: dict[str, float] = {}
    spent: dict[str, float] = {}
    for name, call in calls.items():
        prepare(name)
        best[name] = spent[name] = _time(call)
        yield name, best[name]
    while todo := [name for name in calls if best[name] < SLOW_SECONDS and spent[name] < budget]:
        for name in todo:
            prepare(name)
            spent[name] += _time(calls[name])
            for _ in range(5):
                now = _time(calls[name])
                best[name] = min(best[name], now)
                spent[name] += now
                if now > budget / 5:
                    break
            yield name, best[name]


def _time(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
