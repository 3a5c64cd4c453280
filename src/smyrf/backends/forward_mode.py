"""Refuse forward-mode derivatives, which pass through a custom operator as silent zeros."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_forward_mode(tensors: tuple[Tensor, ...], where: str, instead: str) -> None:
    """Raises if one of the tensors carries a forward-mode derivative.

    Example:
        >>> import torch
        >>> refuse_forward_mode((torch.ones(2),), "backend='torch'", "use another")
    """
    if in_forward_mode(tensors):
        raise RuntimeError(f"forward-mode derivatives are not defined for {where}, and would come out wrong: {instead}")


def in_forward_mode(tensors: tuple[Tensor, ...]) -> bool:
    """Whether one of the tensors carries a forward-mode derivative.

    Example:
        >>> in_forward_mode((torch.ones(2),))
        False
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)  # type: ignore[no-untyped-call]
