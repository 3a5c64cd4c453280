"""`SdpaMode` finds the attention calls of any PyTorch code inside a block, and reads their arguments.

A mode for torch functions is seen only by its own thread, and nothing of PyTorch is changed for others.

Shapes: "…" any leading axes, N queries, M keys, D width, E value width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from smyrf.attention import check_dropout, check_scale, check_tensors
from smyrf.backends.forward_mode import in_forward_mode
from smyrf.call import Call, Reason, four_axes

# The operator by which `smyrf.attention` calls ``F.scaled_dot_product_attention``.
_OURS = torch.ops.aten.scaled_dot_product_attention.default


def read_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Call, Tensor | None]:
    """The arguments of ``F.scaled_dot_product_attention`` as a call, and its mask, which `read_mask` reads.

    Example:
        >>> x = torch.randn(5, 4)
        >>> call, mask = read_arguments(x, x, x, is_causal=True)
        >>> call.q.shape, call.scale, call.is_causal, mask is None
        (torch.Size([1, 1, 5, 4]), 0.5, True, True)
        >>> read_arguments(x, x[:, :3], x)[0].only_dense
        <Reason.FOREIGN: "only PyTorch's function takes its arguments">
    """
    tensors = (query, key, value)
    reason = _unreadable(tensors, attn_mask, dropout_p, scale, enable_gqa)
    if reason is Reason.TENSOR_CLASS:
        return Call(query, key, value, 1.0, only_dense=reason), None
    q, k, v = (four_axes(x) if x.dim() > 1 else x for x in tensors)
    if reason is not None:
        return Call(q, k, v, 1.0, only_dense=reason), None
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return Call(q, k, v, scale, is_causal=bool(is_causal), dropout_p=float(dropout_p)), attn_mask


def _unreadable(
    tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, dropout_p: float, scale: float | None, enable_gqa: bool
) -> Reason | None:
    """Why the arguments cannot be read, except for what is in the mask."""
    # A mask may be of another class too: the memory of PyTorch's CausalBias is never written.
    given = tensors if mask is None else (*tensors, mask)
    if any(type(x) not in (Tensor, Parameter) or x.is_nested or x.is_meta for x in given):
        return Reason.TENSOR_CLASS
    if not torch.compiler.is_compiling():
        if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):
            return Reason.FUNCTORCH
        if in_forward_mode(tensors):
            return Reason.FORWARD_MODE
    try:
        check_tensors(*tensors, None, enable_gqa)
        check_scale(scale)
        check_dropout("dropout_p", dropout_p)
    except (TypeError, ValueError):  # PyTorch takes more than we do, or names the error better
        return Reason.FOREIGN
    if mask is None:
        return None
    n_axes = tensors[0].dim()
    if n_axes > 4:
        return Reason.MASK_AXES
    return None if 2 <= mask.dim() <= n_axes else Reason.FOREIGN


class _Thread(threading.local):
    def __init__(self) -> None:
        self.taken = False  # set from the start: Dynamo cannot see an attribute appear


_thread = _Thread()


@contextmanager
def taken() -> Iterator[None]:
    """Inside the block no mode of this thread sees an attention call: the one being made is already handled."""
    before = _thread.taken
    _thread.taken = True
    try:
        yield
    finally:
        _thread.taken = before


class SdpaMode(TorchFunctionMode):
    """Inside the block, `attend` answers every call of ``F.scaled_dot_product_attention`` of this thread.

    This includes calls inside ``F.multi_head_attention_forward``, and so those of PyTorch's own modules. Calls of
    `smyrf.attention` are excluded unless a subclass sets `sees_ours`.
    """

    sees_ours = False

    def __init__(self) -> None:
        super().__init__()
        # PyTorch runs what it hands to a mode with the mode switched off, and this function attends inside.
        self._multi_head = _with_globals(
            F.multi_head_attention_forward, scaled_dot_product_attention=self._inside, has_torch_function=_never
        )

    def attend(self, call: Call, mask: Tensor | None, lead: torch.Size, run: Callable[[], Tensor]) -> Tensor:
        """The result of an attention call.

        Args:
            call: its arguments, except for the mask.
            mask: not read yet; None if the call cannot be served anyway.
            lead: axes of the result before the last, ``(…, heads, N)``.
            run: makes the call as without the mode, which is the default.
        """
        return run()

    def weights_asked(self) -> None:
        """Called when ``F.multi_head_attention_forward`` is asked for the N × M attention weights."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _thread.taken:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention or (self.sees_ours and func is _OURS):
            return self._answer(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            if not kwargs.get("need_weights", True):
                return self._multi_head(*args, **kwargs)
            self.weights_asked()
        if (func is _BACKWARD or func is _AUTOGRAD_BACKWARD or func is _AUTOGRAD_GRAD) and _plain(types):
            with self:
                return _UNASKED[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _inside(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._answer(F.scaled_dot_product_attention, args, kwargs)

    def _answer(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        try:
            call, mask = read_arguments(*args, **kwargs)
        except TypeError:  # PyTorch names what is wrong, or knows more arguments than we do
            return func(*args, **kwargs)
        query: Tensor = args[0] if args else kwargs["query"]
        return self.attend(call, mask, query.shape[:-1], lambda: func(*args, **kwargs))


def _with_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of one of PyTorch's functions in which some global names are bound to other objects.

    The copy's globals have no ``__name__``: Dynamo would look names up in the module of that name instead.
    """
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, **names}
    del names["__name__"]
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _plain(types: Iterable[type]) -> bool:
    """Whether no tensor class overrides torch functions."""
    return all(kind in (Tensor, Parameter) for kind in types)


def _never(*_: object) -> bool:
    return False


# Activation checkpointing repeats calls inside these functions, so they run with the mode switched on. Their copies do
# not ask for torch-function overrides.
_BACKWARD, _AUTOGRAD_BACKWARD, _AUTOGRAD_GRAD = Tensor.backward, torch.autograd.backward, torch.autograd.grad
_UNASKED = {
    function: _with_globals(function, has_torch_function=_never, has_torch_function_unary=_never)
    for function in (_BACKWARD, _AUTOGRAD_BACKWARD, _AUTOGRAD_GRAD)
}
