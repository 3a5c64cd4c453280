"""Lower bound of the time for attention: its matrix products only, at the rate of large ones on this machine."""

from __future__ import annotations

from collections.abc import Callable

import torch

from smyrf.methods import Method
from smyrf.tools.bench.problems import DTYPES, Problem

# Sizes of the square products that are timed; which is faster depends on caches and threads.
SIZES = (1024, 2048)
# Half precision is left out: attention sums in float32, at another rate.
MEASURED = ("float32", "float64")


def products(dtype: str) -> dict[str, Callable[[], None]]:
    """Matrix products to time, by name; none in half precision.

    Example:
        >>> list(products("float64")), list(products("float16"))
        (['product of 1024', 'product of 2048'], [])
    """
    return {_name(size): _product(size, DTYPES[dtype]) for size in SIZES} if dtype in MEASURED else {}


def gflops(seconds: dict[str, float]) -> float | None:
    """The rate of the fastest of the `products`, in GFLOP per second; None if none was timed.

    Example:
        >>> gflops({"product of 1024": 0.02, "sdpa": 1.0})
        107.3741824
    """
    rates = [2 * size**3 / seconds[_name(size)] / 1e9 for size in SIZES if _name(size) in seconds]
    return max(rates, default=None)


def flops(problem: Problem, method: Method) -> float:
    """Floating-point operations of attention: 2 · batch · heads · N · u · (D + E), with u key visits per query.

    A key visit is one score and one row of values. Backward has five such products where forward has two (the scores
    again, dv, dp, dq, dk), so both together take 3.5 times the operations of forward. Hashing, sorting, exponentials
    and gathers are not counted.

    Example:
        >>> from smyrf.methods import Smyrf
        >>> flops(Problem(1, 4, 1024, 64, "float32", backward=False), Smyrf(4, 64))
        268435456.0
    """
    rows = problem.batch * problem.heads * problem.length
    forward = 2.0 * rows * method.key_visits(problem.length) * (problem.width + problem.width)
    return forward * 3.5 if problem.backward else forward


def _product(size: int, dtype: torch.dtype) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, size, size, dtype=dtype, generator=generator)
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    return multiply


def _name(size: int) -> str:
    return f"product of {size}"
