"""Reusable scratch buffers.

A freshly allocated megabyte costs more in page faults than in arithmetic: reuse makes a gather ten times faster on the
CPU. So each thread keeps its small buffers from one call to the next.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Largest buffer, in bytes, that is kept after a call; most are a tenth of it.
KEEP_BYTES = 20 << 20

_kept = threading.local()


class Workspace:
    """Named scratch tensors; asking for a name again overwrites what was there.

    Example:
        >>> import torch
        >>> with workspace(torch.device("cpu")) as scratch:
        ...     first = scratch.get("scores", (4, 3), torch.float32)
        ...     second = scratch.get("scores", (2, 5), torch.float32)
        >>> first.data_ptr() == second.data_ptr()
        True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of the given shape, with arbitrary content."""
        size = math.prod(shape)
        buffer = self.buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # what such a block makes could not be written to later
                buffer = torch.empty(size, dtype=dtype, device=self.device)
            self.buffers[name, dtype] = buffer
        return buffer[:size].view(shape)


@contextmanager
def workspace(device: torch.device) -> Iterator[Workspace]:
    """This thread's workspace for a device. Large buffers are freed at the end."""
    spaces = _kept.__dict__
    space = spaces.pop(str(device), None) or Workspace(device)
    yield space
    space.buffers = {key: x for key, x in space.buffers.items() if x.nbytes <= KEEP_BYTES}
    spaces[str(device)] = space
