"""Problems, suites of problems and methods, and the paper's two experiments as presets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smyrf.methods import Method, Smyrf

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Problem:
    """One attention call on random q, k, v of a given shape: forward only, or forward and backward.

    Example:
        >>> Problem(batch=2, heads=4, length=100, width=8, dtype="float32", backward=False).inputs()[0].shape
        torch.Size([2, 4, 100, 8])
    """

    batch: int
    heads: int
    length: int
    width: int
    dtype: str
    backward: bool

    @property
    def direction(self) -> str:
        """Which passes it measures, in words."""
        return "forward + backward" if self.backward else "forward"

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v: independent normal vectors, the same at every call."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.heads, self.length, self.width)
        q, k, v = (torch.randn(shape, generator=generator).to(DTYPES[self.dtype]) for _ in range(3))
        if self.backward:
            for x in (q, k, v):
                x.requires_grad_()
        return q, k, v

    def bind(self, run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], None]:
        """A function without arguments that solves the problem once with `run`."""
        q, k, v = self.inputs()

        def forward() -> None:
            with torch.no_grad():
                run(q, k, v)

        def both() -> None:
            out = run(q, k, v)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        return both if self.backward else forward


@dataclass(frozen=True)
class Suite:
    """Problems and methods of one run.

    Args:
        backends: on which each method runs; None is the best for the device.
        without: baselines that are left out.
    """

    problems: tuple[Problem, ...]
    methods: tuple[Method, ...]
    backends: tuple[str | None, ...] = (None,)
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preset:
    """An experiment: pairs of batch and length, and methods."""

    shapes: tuple[tuple[int, int], ...]
    methods: tuple[Method, ...]
    says: str


PRESETS = {
    "batch1": Preset(
        shapes=tuple((1, 1024 * 2**i) for i in range(7)),
        methods=(Smyrf(4, 64), Smyrf(8, 32), Smyrf(8, 64)),
        says="batch 1 with growing length, several rounds × cluster sizes (second speed plot of the paper)",
    ),
    "fixed-tokens": Preset(
        shapes=tuple((65536 // n, n) for n in (512, 1024, 2048, 4096, 8192, 16384)),
        methods=(Smyrf(4, 64),),
        says="batch × length fixed at 65,536 (first speed plot of the paper)",
    ),
    "native": Preset(
        shapes=tuple((1, 128 * 2**i) for i in range(10)),
        methods=(Smyrf(4, 64),),
        says="batch 1 from 128 to 65,536 tokens, to compare backends: --backend native --backend torch",
    ),
    "quick": Preset(
        shapes=((1, 1024), (1, 2048), (1, 4096), (1, 8192)),
        methods=(Smyrf(4, 64),),
        says="a minute, to see that it works",
    ),
}


def make_suite(
    shapes: Sequence[tuple[int, int]],
    methods: Sequence[Method],
    *,
    heads: int,
    width: int,
    dtype: str,
    backward: bool,
    backends: tuple[str | None, ...] = (None,),
    without: tuple[str, ...] = (),
) -> Suite:
    """A suite for pairs of batch and length: forward, then forward and backward if asked for.

    Example:
        >>> shapes = PRESETS["batch1"].shapes
        >>> len(make_suite(shapes, [Smyrf(4, 64)], heads=4, width=64, dtype="float32", backward=True).problems)
        14
    """
    directions = (False, True) if backward else (False,)
    problems = [Problem(batch, heads, n, width, dtype, direction) for direction in directions for batch, n in shapes]
    return Suite(tuple(problems), tuple(methods), backends, without)
