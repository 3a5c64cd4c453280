"""What attention would take if it were matrix products alone, at the rate that this machine reaches in them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from smyrf.methods import Smyrf, Tangent
from smyrf.tools.bench.cases import DTYPES, Problem

# Square products that are timed. Which of them is the faster depends on the caches and on the threads.
SIZES = (1024, 2048)
# Products in half precision run at another rate than the sums in float32 that attention needs: no bound.
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


def flops(problem: Problem, method: Smyrf | Tangent) -> float:
    """Operations of the attention proper: 2 · batch · heads · N · u · (D + E), with u key visits per query.

    A key visit is a score and a row of values, a multiplication and an addition for each of D and E numbers. Backward
    has five such products where forward has two (the scores again, dv, dp, dq, dk), so both together have 3.5 times
    as many operations. For `Smyrf` u is H times the keys of a cluster, for `Tangent` its budget, in which the passes
    over centroids count. Hashing, sorting, exponentials and gathers do not count: they are what may be lost.

    Example:
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
