"""What to measure: problems, methods and the paper's two experiments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smyrf.methods import Smyrf, Tangent

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Problem:
    """One attention call: random q, k, v of a shape, forward alone or with its gradient.

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

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Independent normal vectors, the same for everyone who asks."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.heads, self.length, self.width)
        q, k, v = (torch.randn(shape, generator=generator).to(DTYPES[self.dtype]) for _ in range(3))
        if self.backward:
            for x in (q, k, v):
                x.requires_grad_()
        return q, k, v


@dataclass(frozen=True)
class Plan:
    """Problems and methods of one run.

    Args:
        backends: kernels that each method is run on; None is the one that is chosen without asking.
        without: baselines that are left out.
    """

    problems: tuple[Problem, ...]
    methods: tuple[Smyrf | Tangent, ...]
    backends: tuple[str | None, ...] = (None,)
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preset:
    """An experiment: pairs of batch and length, and methods."""

    shapes: tuple[tuple[int, int], ...]
    methods: tuple[Smyrf | Tangent, ...]
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
        says="batch 1 from 128 to 65,536 tokens, for kernels side by side: --backend native --backend torch",
    ),
    "quick": Preset(
        shapes=((1, 1024), (1, 2048), (1, 4096), (1, 8192)),
        methods=(Smyrf(4, 64),),
        says="a minute, to see that it works",
    ),
}
