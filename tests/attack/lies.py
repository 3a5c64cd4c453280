"""Tensors that lie about themselves: attributes of instances, methods of subclasses, classes that only claim to be one.

All hold the right numbers, so a call either raises or gives the right result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.attack.guarded import guarded

# No tensor is there.
NOWHERE = 8


class _Endless:
    """A storage that claims to be large."""

    def nbytes(self) -> int:
        return 2**62


# Attributes of an instance, which come before the methods of its class.
INSTANCE_LIES: dict[str, dict[str, Callable[[Tensor], Any]]] = {
    "data_ptr": {"data_ptr": lambda x: NOWHERE},
    "data_ptr, large": {"data_ptr": lambda x: 2**62},
    "data_ptr, text": {"data_ptr": lambda x: "x"},
    "stride, none": {"stride": lambda x: ()},
    "stride, no tuple": {"stride": lambda x: None},
    "stride, zeros": {"stride": lambda x: (0,) * x.dim()},
    "stride, large": {"stride": lambda x: (2**62,) * x.dim()},
    "stride, negative": {"stride": lambda x: (-(2**31),) * x.dim()},
    "storage_offset": {"storage_offset": lambda x: -(2**62)},
    "element_size": {"element_size": lambda x: 0},
    "untyped_storage": {"untyped_storage": lambda x: _Endless()},
    "all of its memory": {
        "data_ptr": lambda x: NOWHERE,
        "untyped_storage": lambda x: _Endless(),
        "element_size": lambda x: 0,
    },
}


def _with_attributes(x: Tensor, lies: dict[str, Callable[[Tensor], Any]]) -> Tensor:
    for name, lie in lies.items():
        value = lie(x)
        setattr(x, name, lambda value=value: value)
    return x


def _parameter(x: Tensor) -> Tensor:
    return torch.nn.Parameter(x, requires_grad=False)


class _Subclass(torch.Tensor):
    """A subclass; what `as_subclass` returns is up to classes below."""


class _ReturnsTemporary(_Subclass):
    def as_subclass(self, cls: Any) -> Any:
        return guarded(torch.Tensor.as_subclass(self, torch.Tensor))


class _ReturnsLiar(_Subclass):
    def as_subclass(self, cls: Any) -> Any:
        return _with_attributes(torch.Tensor.as_subclass(self, torch.Tensor), INSTANCE_LIES["data_ptr"])


class _ReturnsItself(_Subclass):
    def as_subclass(self, cls: Any) -> Any:
        return self


class _ReturnsNothing(_Subclass):
    def as_subclass(self, cls: Any) -> Any:
        return None


class _ReturnsNumber(_Subclass):
    def as_subclass(self, cls: Any) -> Any:
        return 3


class _Raises(_Subclass):
    def as_subclass(self, cls: Any) -> Any:
        raise KeyError("as_subclass")


class _Resized(_Subclass):
    """Its properties are those of a longer tensor."""

    @property
    def shape(self) -> Any:
        return torch.Size([2**20] * self.dim())

    def data_ptr(self) -> int:
        return NOWHERE


class _Dispatched(torch.Tensor):
    """Every function of PyTorch returns a temporary."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                return guarded(torch.Tensor.as_subclass(result, torch.Tensor))
            return NOWHERE if getattr(func, "__name__", "") == "data_ptr" else result


class _Impostor:
    """No tensor, but its class says so."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @property
    def __class__(self) -> Any:
        return torch.Tensor

    def as_subclass(self, cls: Any) -> Any:
        return guarded(self.x)


def _subclassed(cls: type[Tensor]) -> Callable[[Tensor], Any]:
    return lambda x: torch.Tensor.as_subclass(x, cls)


LIES: dict[str, Callable[[Tensor], Any]] = {
    **{f"lies: {name}": (lambda x, lies=lies: _with_attributes(x, lies)) for name, lies in INSTANCE_LIES.items()},
    **{
        f"parameter lies: {name}": (lambda x, lies=lies: _with_attributes(_parameter(x), lies))
        for name, lies in INSTANCE_LIES.items()
    },
    "as_subclass returns a temporary": _subclassed(_ReturnsTemporary),
    "as_subclass returns a liar": _subclassed(_ReturnsLiar),
    "as_subclass returns itself": _subclassed(_ReturnsItself),
    "as_subclass returns None": _subclassed(_ReturnsNothing),
    "as_subclass returns a number": _subclassed(_ReturnsNumber),
    "as_subclass raises": _subclassed(_Raises),
    "a subclass with another shape": _subclassed(_Resized),
    "a subclass of temporaries": _subclassed(_Dispatched),
    "a class that claims to be a tensor": _Impostor,
}
# What is written to these goes into another tensor: an output is then lost, which is no crash.
LOSES_OUTPUT = ("as_subclass returns a temporary", "a subclass of temporaries", "a class that claims to be a tensor")
