"""Tensors whose memory ends at a page that cannot be accessed, and is unmapped when they are freed.

A read or write after the end, or after the tensor is gone, ends the process, where the heap would hide it.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(x: Tensor) -> Tensor:
    """A contiguous copy that ends at a guard page; empty tensors have no memory."""
    n_bytes = x.numel() * x.element_size()
    if n_bytes == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    size = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(start)
    del start
    if _libc.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect failed")
    copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=size - n_bytes).view(x.shape)
    copy.copy_(x)
    return copy
