"""`intercept_sdpa`: another method for the attention calls of any PyTorch code, inside a block.

Shapes: "…" any leading axes, N queries, M keys, D width, E value width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smyrf.attention import attention, check_dropout, check_scale, check_tensors
from smyrf.backends.forward_mode import in_forward_mode
from smyrf.methods import Method, check_method
from smyrf.models.masks import ReadMask, read_mask
from smyrf.models.report import Calls
from smyrf.models.sdpa_mode import SdpaCall, SdpaMode, taken


@contextmanager
def intercept_sdpa(method: Method, *, from_keys: int = 0) -> Iterator[Calls]:
    """Inside the block, calls of ``F.scaled_dot_product_attention`` attend by a method.

    Those of PyTorch's own modules are among them (``nn.MultiheadAttention`` and all that is built on it, in training
    and in evaluation), those of `smyrf.attention` are not. Other threads see nothing of it, even if they are started
    inside the block. Of several blocks around a call the innermost counts. Tasks of asyncio share a thread: one that
    waits inside its block leaves it to the others.

    A call that the method cannot serve runs as it would without the block, and is counted with the reason: one that
    asks for attention weights, whose mask is neither padding nor causal, or whose mask adds a bias to the scores. So
    does one with a single query, with few keys, or so short that the method is exact.

    Args:
        method: as in `smyrf.attention`; `smyrf.Smyrf` draws its clusters from PyTorch's own generator.
        from_keys: calls with fewer keys than this stay dense.

    Yields:
        what became of the calls, counted as they are made.

    A function that ``torch.compile`` has compiled obeys the block around its call, uncounted; a mask other than a bool
    one of a single row, ``(…, 1, M)``, breaks its graph. Activation checkpointing makes the calls again in the backward
    pass, which therefore has to be inside the block. TorchScript and C++ call attention unseen. The fused form of
    PyTorch's modules is not used inside the block, and it alone takes nested tensors.

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
    mode = Interception(method, Calls(), from_keys)
    before, _thread.block = _thread.block, mode
    try:
        with mode:
            yield mode.calls
    finally:
        _thread.block = before


class Interception(SdpaMode):
    """`intercept_sdpa` as a mode, with counts that are given.

    Example:
        >>> import torch, smyrf
        >>> calls, x = Calls(), torch.randn(1, 2, 5, 4)
        >>> with Interception(smyrf.Dense(), calls):
        ...     out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> print(calls)
        0 calls by the method, 1 dense: the method is exact at this length (1)
    """

    def __init__(self, method: Method, calls: Calls, from_keys: int = 0) -> None:
        super().__init__()
        self.method = method
        self.calls = calls
        self.from_keys = from_keys

    def attend(self, call: SdpaCall, run: Callable[[], Tensor]) -> Tensor:
        with taken():
            mask = read_call(call, self.method, self.from_keys)
            if mask.only_dense:
                out = run()
                self._count(mask.only_dense)
                return out
            q = call.query
            out = attention(
                q,
                call.key,
                call.value,
                method=self.method,
                # (…, M), as many leading axes as there are before the heads
                key_mask=None if mask.key_mask is None else mask.key_mask.reshape(*q.shape[:-3], call.key.shape[-2]),
                is_causal=mask.is_causal,
                scale=call.scale,
                dropout_p=call.dropout_p,
                enable_gqa=call.enable_gqa,
            )
            self._count("")
            return out

    def weights_asked(self) -> None:
        self._count("attention weights were asked for")

    def _count(self, reason: str) -> None:
        if torch.compiler.is_compiling():
            return
        if reason:
            self.calls.by_dense(reason)
        else:
            self.calls.by_method()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.block: Interception | None = None


_thread = _Thread()


def innermost() -> Interception | None:
    """The `intercept_sdpa` that this thread is in.

    Example:
        >>> innermost() is None
        True
    """
    return _thread.block


def check_from_keys(from_keys: object) -> None:
    """Raises unless `from_keys` is an int from 0."""
    if not isinstance(from_keys, int) or isinstance(from_keys, bool):
        raise TypeError(f"{from_keys=} must be an int")
    if from_keys < 0:
        raise ValueError(f"{from_keys=} must not be negative")


def read_call(call: SdpaCall, method: Method, from_keys: int = 0) -> ReadMask:
    """The mask of a call as `smyrf.attention` takes it, or why the call stays as it is.

    Example:
        >>> import smyrf
        >>> x = torch.randn(1, 2, 512, 4)
        >>> read_call(SdpaCall(x, x, x, is_causal=True), smyrf.Tangent(0.25))
        ReadMask(key_mask=None, is_causal=True, only_dense='')
        >>> read_call(SdpaCall(x[:, :, :1], x, x), smyrf.Tangent(0.25)).only_dense
        'one query'
    """
    reason = _unlike_ours(call)
    if reason:
        return ReadMask(None, False, reason)
    q, k, mask = call.query, call.key, call.attn_mask
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    if n_queries == 1:
        return ReadMask(None, False, "one query")
    if n_keys < from_keys:
        return ReadMask(None, False, f"fewer than {from_keys:,} keys")
    if method.is_exact(n_queries, n_keys):
        return ReadMask(None, False, _EXACT)
    found = ReadMask(None, call.is_causal, "")
    if mask is not None:
        if q.dim() > 4:
            return ReadMask(None, False, "it has a mask and more than four axes")
        if mask.dim() < 2 or not _broadcasts(mask, (*q.shape[:-1], n_keys)):
            return ReadMask(None, False, _OTHER)
        found = read_mask(mask, len(q) if q.dim() == 4 else 1, n_queries, n_keys)
        found = found._replace(is_causal=found.is_causal or call.is_causal)
    if found.is_causal and not found.only_dense and method.plan(n_queries, n_keys, is_causal=True).is_exact:
        return ReadMask(None, False, _EXACT)
    return found


_EXACT = "the method is exact at this length"
# PyTorch takes more than we do, and has better words for what it does not take.
_OTHER = "its arguments are for PyTorch's function alone"


def _unlike_ours(call: SdpaCall) -> str:
    """Why the tensors or numbers of a call are none for `smyrf.attention`; "" if they are."""
    tensors = (call.query, call.key, call.value)
    # A mask too may be of another class: what is in the memory of PyTorch's CausalBias means nothing.
    masks = () if call.attn_mask is None else (call.attn_mask,)
    if any(type(x) not in (Tensor, nn.Parameter) or x.is_nested or x.is_meta for x in (*tensors, *masks)):
        return "its tensors are nested, without data or of another class"
    if not torch.compiler.is_compiling():
        if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):
            return "it is inside a transform of torch.func"
        if in_forward_mode(tensors):
            return "it has forward-mode derivatives"
    try:
        check_tensors(*tensors, None, call.enable_gqa)
        check_scale(call.scale)
        check_dropout("dropout_p", call.dropout_p)
    except (TypeError, ValueError):
        return _OTHER
    return ""


def _broadcasts(mask: Tensor, shape: tuple[int, ...]) -> bool:
    return mask.dim() <= len(shape) and all(
        size in (1, full) for size, full in zip(reversed(mask.shape), reversed(shape), strict=False)
    )
