"""Load the C++ extension `smyrf._native`, or say why it is missing, and describe tensors to it.

The extension does not know PyTorch: it takes addresses, sizes and strides. Callers keep the tensors alive.
"""

from __future__ import annotations

import os

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
    "address",
    "execution",
    "instruction_sets",
    "n_threads",
    "narrow",
    "native",
    "ready",
    "rows",
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


def execution(dtype: torch.dtype) -> native.Execution:
    """How a kernel runs now: precision, threads, instruction set."""
    return native.Execution(double_precision=dtype == torch.float64, threads=n_threads(), isa=ISA)


def address(x: Tensor | None) -> int:
    """Address of a tensor, 0 for None."""
    return 0 if x is None else x.data_ptr()


def rows(x: Tensor) -> native.Rows:
    """Address and strides of ``(batch, heads, N, D)``."""
    batch_stride, head_stride, row_stride, _ = x.stride()
    return native.Rows(address=x.data_ptr(), batch_stride=batch_stride, head_stride=head_stride, row_stride=row_stride)
