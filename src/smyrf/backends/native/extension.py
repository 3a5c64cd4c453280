"""The C++ extension `smyrf._native`, or why it is not there, and how tensors are handed to it.

It knows nothing of PyTorch: it is handed addresses, sizes and strides. Whoever calls it keeps the tensors alive.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

# After torch, whose OpenMP runtime is the one that it uses.
try:
    import smyrf._native as native
except ModuleNotFoundError:
    MISSING = "it was not built when smyrf was installed, for want of a C++17 compiler"
except ImportError as error:
    MISSING = str(error)
else:
    MISSING = ""

__all__ = ["ISA", "MISSING", "instruction_sets", "n_threads", "native", "ready", "rows"]

# The instruction set to use, of `instruction_sets`; "" for the best.
ISA = ""


def instruction_sets() -> list[str]:
    """What this machine can run, the best one last; empty without the extension."""
    return [] if MISSING else list(native.instruction_sets())


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def n_threads() -> int:
    """As many as PyTorch's operators have; one in a forked process, where OpenMP waits for threads that are gone."""
    return 1 if _forked else torch.get_num_threads()


def ready(x: Tensor) -> Tensor:
    """In a dtype that the extension computes in, with a contiguous last axis.

    Example:
        >>> import torch
        >>> ready(torch.ones(2, 3, dtype=torch.bfloat16).T).stride()
        (2, 1)
    """
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def rows(x: Tensor) -> list[int]:
    """Address and strides of ``(batch, heads, N, D)``."""
    return [x.data_ptr(), *x.stride()[:3]]
