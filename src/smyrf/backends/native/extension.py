"""Load the C++ extension `smyrf._native`, or say why it is missing, and prepare tensors for it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

# After torch, whose OpenMP runtime it uses.
try:
    import smyrf._native as native
except ModuleNotFoundError:
    MISSING = "it was not built when smyrf was installed, because no C++17 compiler was found"
except ImportError as error:
    MISSING = str(error)
else:
    MISSING = ""

__all__ = [
    "ISA",
    "MISSING",
    "instruction_sets",
    "n_threads",
    "narrow",
    "native",
    "ready",
    "running",
]

# The instruction set to use, one of `instruction_sets`; "" for the best.
ISA = ""


def instruction_sets() -> list[str]:
    """Instruction sets that this machine can run, the best last; empty without the extension."""
    return [] if MISSING else native.instruction_sets()


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def n_threads() -> int:
    """PyTorch's thread count, or 1 after a fork (OpenMP would wait for threads that no longer exist)."""
    return 1 if _forked else torch.get_num_threads()


def ready(x: Tensor) -> Tensor:
    """x in float32 or float64, with a contiguous last axis.

    Example:
        >>> import torch
        >>> ready(torch.ones(2, 3, dtype=torch.bfloat16).T).stride()
        (2, 1)
    """
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def narrow(x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Integers in a narrower dtype; raises IndexError for one that does not fit into it.

    Example:
        >>> import torch
        >>> narrow(torch.tensor([3]), torch.int32, "keys").dtype
        torch.int32
        >>> narrow(torch.tensor([2**32 + 3]), torch.int32, "keys")
        Traceback (most recent call last):
        ...
        IndexError: 4294967299 of keys is out of range for torch.int32
    """
    if x.dtype == dtype:
        return x
    if x.numel() > 0:
        limits, (low, high) = torch.iinfo(dtype), x.aminmax()
        for value in (int(low), int(high)):
            if not limits.min <= value <= limits.max:
                raise IndexError(f"{value} of {name} is out of range for {dtype}")
    return x.to(dtype)


def running() -> dict[str, Any]:
    """How a kernel runs now: number of threads and instruction set."""
    return {"threads": n_threads(), "isa": ISA}
