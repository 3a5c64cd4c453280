"""Attention calls of any PyTorch code, seen inside a block: the one place that finds them.

A mode for torch functions is seen by its own thread alone, and nothing of PyTorch is changed for others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from smyrf.backends.dense import exact_attention


class SdpaCall(NamedTuple):
    """Arguments of ``F.scaled_dot_product_attention``, by its names.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 2, 5, 4)
        >>> SdpaCall(x, x, x, is_causal=True).dropout_p
        0.0
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class _Thread(threading.local):
    def __init__(self) -> None:
        self.taken = False  # of each thread from the start: Dynamo cannot see an attribute appear


_thread = _Thread()


@contextmanager
def taken() -> Iterator[None]:
    """Inside the block no mode of this thread sees an attention call: someone has taken the one that is being made."""
    before = _thread.taken
    _thread.taken = True
    try:
        yield
    finally:
        _thread.taken = before


class SdpaMode(TorchFunctionMode):
    """Inside the block, `attend` answers every call of ``F.scaled_dot_product_attention`` of this thread.

    Those inside ``F.multi_head_attention_forward``, and so those of PyTorch's own modules, are among them; those of
    `smyrf.attention` are not, except for a subclass that says so.
    """

    sees_ours = False

    def __init__(self) -> None:
        super().__init__()
        # PyTorch runs what it hands to a mode with the mode switched off, and this function attends inside.
        self._multi_head = _with_globals(
            F.multi_head_attention_forward, scaled_dot_product_attention=self._inside, has_torch_function=_never
        )

    def attend(self, call: SdpaCall, run: Callable[[], Tensor]) -> Tensor:
        """The result of an attention call; `run` makes it as it would be made, which is what happens by default."""
        return run()

    def weights_asked(self) -> None:
        """Is told of a call of ``F.multi_head_attention_forward`` that forms the N × M map to return it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _thread.taken:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention or (self.sees_ours and func is exact_attention):
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
            call = SdpaCall(*args, **kwargs)
        except TypeError:  # PyTorch says what is wrong, or knows more arguments than we do
            return func(*args, **kwargs)
        return self.attend(call, lambda: func(*args, **kwargs))


def _with_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of a function of PyTorch, in which some global names mean something else.

    The copy's globals have no name of their own: Dynamo would look into the module of that name instead.
    """
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, **names}
    del names["__name__"]
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _plain(types: Iterable[type]) -> bool:
    """Whether no class of tensors answers for itself."""
    return all(kind in (Tensor, Parameter) for kind in types)


def _never(*_: object) -> bool:
    return False


# Activation checkpointing makes calls again inside these: they run with the mode switched on, and do not ask for it.
_BACKWARD, _AUTOGRAD_BACKWARD, _AUTOGRAD_GRAD = Tensor.backward, torch.autograd.backward, torch.autograd.grad
_UNASKED = {
    function: _with_globals(function, has_torch_function=_never, has_torch_function_unary=_never)
    for function in (_BACKWARD, _AUTOGRAD_BACKWARD, _AUTOGRAD_GRAD)
}
