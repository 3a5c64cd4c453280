"""`intercept_sdpa`: another method for the attention calls of any PyTorch code, inside a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from smyrf.backends import check_backend
from smyrf.call import Call, Reason, why_dense
from smyrf.methods import Method, check_method
from smyrf.models.calls import serve
from smyrf.models.masks import read_mask
from smyrf.models.report import Calls
from smyrf.models.sdpa_calls import SdpaMode, taken


@contextmanager
def intercept_sdpa(method: Method, *, from_keys: int = 0, backend: str | None = None) -> Iterator[Calls]:
    """Inside the block, calls of ``F.scaled_dot_product_attention`` are served by a method.

    This includes the calls of PyTorch's own modules (``nn.MultiheadAttention`` and everything built on it, in training
    and in evaluation) and excludes those of `smyrf.attention`. Other threads are not affected, even if they are started
    inside the block. If blocks are nested, the innermost counts. Tasks of asyncio share a thread: a task that waits
    inside its block leaves the block open for the others.

    A call that the method cannot serve runs as without the block, and is counted with the reason: a call that asks for
    attention weights, whose mask is neither padding nor causal, or whose mask adds a bias to the scores; also a call
    with a single query, with few keys, or so short that the method is exact.

    Args:
        method: as in `smyrf.attention`; `smyrf.Smyrf` draws its clusters from PyTorch's generator.
        from_keys: calls with fewer keys stay dense.
        backend: as in `smyrf.attention`; if one is named, it also serves calls for which the method is exact.

    Yields:
        how the calls were served, counted as they are made.

    A function compiled by ``torch.compile`` obeys the block around its call, uncounted; a mask other than a bool mask
    with a single row, ``(…, 1, M)``, breaks its graph. Activation checkpointing repeats the calls in the backward pass,
    which therefore has to be inside the block. TorchScript and C++ call attention unseen. The fused form of PyTorch's
    modules, the only one that takes nested tensors, is not used inside the block.

    Example:
        >>> import torch, smyrf
        >>> layer = torch.nn.TransformerEncoderLayer(32, 2, batch_first=True)
        >>> with smyrf.intercept_sdpa(smyrf.Tangent(0.25)) as calls:
        ...     out = layer(torch.randn(1, 512, 32))
        >>> print(calls)
        1 call by the method
    """
    check_method(method)
    check_from_keys(from_keys)
    check_backend(backend)
    mode = Interception(method, Calls(), from_keys, backend)
    before, _thread.block = _thread.block, mode
    try:
        with mode:
            yield mode.calls
    finally:
        _thread.block = before


class Interception(SdpaMode):
    """`intercept_sdpa` as a mode that counts into given `Calls`.

    Example:
        >>> import torch, smyrf
        >>> calls, x = Calls(), torch.randn(1, 2, 5, 4)
        >>> with Interception(smyrf.Dense(), calls):
        ...     out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> print(calls)
        0 calls by the method, 1 dense: the method is exact at this length (1)
    """

    def __init__(self, method: Method, calls: Calls, min_keys: int = 0, backend: str | None = None) -> None:
        super().__init__()
        self.method = method
        self.calls = calls
        self.min_keys = min_keys
        self.backend = backend

    def attend(self, call: Call, mask: Tensor | None, lead: torch.Size, run: Callable[[], Tensor]) -> Tensor:
        with taken():
            reason = self._why_dense(call)
            if reason is None and mask is not None:  # a mask is only looked at if it matters
                call = read_mask(call, mask)
                reason = self._why_dense(call)
            if reason is None:
                out = serve(call, self.method, backend=self.backend)  # (batch, heads, N, E)
                out = out.reshape(*lead, out.shape[-1])  # (…, heads, N, E)
            else:
                out = run()
            self._count(reason)
            return out

    def weights_asked(self) -> None:
        self._count(Reason.WEIGHTS)

    def _why_dense(self, call: Call) -> Reason | None:
        return why_dense(call, self.method, self.min_keys, self.backend)

    def _count(self, reason: Reason | None) -> None:
        if not torch.compiler.is_compiling():
            self.calls.count(reason)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.block: Interception | None = None


_thread = _Thread()


def innermost() -> Interception | None:
    """The innermost `intercept_sdpa` block of this thread.

    Example:
        >>> innermost() is None
        True
    """
    return _thread.block


def check_from_keys(from_keys: object) -> None:
    """Raises unless `from_keys` is an int of at least 0."""
    if not isinstance(from_keys, int) or isinstance(from_keys, bool):
        raise TypeError(f"{from_keys=} must be an int")
    if from_keys < 0:
        raise ValueError(f"{from_keys=} must not be negative")
