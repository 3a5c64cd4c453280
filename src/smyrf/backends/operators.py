"""Registration of operators: fake implementations and gradients that the backends share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef


def differentiable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The floating-point tensors among packed groups; the others are indices.

    Example:
        >>> len(differentiable([torch.ones(2), torch.arange(3)]))
        1
    """
    return [x for x in tensors if x.dtype.is_floating_point]


def register(forward: CustomOpDef, backward: CustomOpDef) -> None:
    """Register fake implementations of both operators, and the second as the gradient of the first."""
    forward.register_fake(_fake_forward)
    backward.register_fake(_fake_backward)
    forward.register_autograd(_gradient_by(backward), setup_context=_setup_context)
    refuse_second_gradient(backward)


def refuse_second_gradient(backward: CustomOpDef) -> None:
    """Let a gradient of the operator `backward`, which is itself a gradient, raise with a way out."""

    def differentiate(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "this backend has no second derivatives: call attention(…, backend='reference'), which has them"
        )

    backward.register_autograd(differentiate)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3], dtype=wide)


def _fake_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], *_: Any
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, *differentiable(tensors))]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, tensors, ctx.layout, ctx.scale, ctx.dropout_p, seed = inputs
    ctx.save_for_backward(*output, q, k, v, *tensors, seed)
    ctx.mark_non_differentiable(output[1])


def _gradient_by(backward: CustomOpDef) -> Callable[..., tuple[Any, ...]]:
    def differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        out, lse, q, k, v, *tensors, seed = ctx.saved_tensors
        dq, dk, dv, *rest = backward(grad, out, lse, q, k, v, tensors, ctx.layout, ctx.scale, ctx.dropout_p, seed)
        of_tensors = iter(rest)
        dtensors = [next(of_tensors) if x.dtype.is_floating_point else None for x in tensors]
        return dq, dk, dv, dtensors, None, None, None, None

    return differentiate
