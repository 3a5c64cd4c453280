"""The attention calls of a model on a batch, and a call served by a method.

Shapes: batch, heads, N queries, M keys, D width, E value width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from smyrf.attention import attention
from smyrf.call import Call, four_axes
from smyrf.methods import Dense, Method
from smyrf.models.capture import CaptureAttention
from smyrf.models.changed import changed


def serve(
    call: Call, method: Method, *, generator: torch.Generator | int | None = None, backend: str | None = None
) -> Tensor:
    """`smyrf.attention` on a call.

    Returns:
        ``(batch, heads, N, E)``.

    Example:
        >>> import smyrf
        >>> x = torch.randn(1, 2, 300, 4)
        >>> serve(Call(x, x, x, 0.5), smyrf.Tangent(0.25)).shape
        torch.Size([1, 2, 300, 4])
    """
    return attention(
        call.q,
        call.k,
        call.v,
        method=method,
        key_mask=call.key_mask,
        is_causal=call.is_causal,
        scale=call.scale,
        dropout_p=call.dropout_p,
        enable_gqa=True,
        generator=generator,
        backend=backend,
    )


def model_calls(model: nn.Module, batch: Any) -> list[Call]:
    """Run a model on a batch, in eval mode and without gradients, and record its attention calls.

    Args:
        model: is left as it was found.
        batch: a mapping of keyword arguments, a tuple or list of arguments, or the only argument.

    Example:
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> calls = model_calls(layer, {"query": x, "key": x, "value": x, "need_weights": False})
        >>> len(calls), calls[0].q.shape
        (1, torch.Size([1, 2, 5, 4]))
    """
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(changed(module, "training", module.training))
        model.eval()
        stack.enter_context(_through_sdpa(model))
        stack.enter_context(torch.no_grad())
        capture = stack.enter_context(CaptureAttention())
        names = stack.enter_context(_callers(model, capture))
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, tuple | list):
            model(*batch)
        else:
            model(batch)
    if not capture.calls:
        raise ValueError(
            f"model: {type(model).__name__} made no call of F.scaled_dot_product_attention on this batch, so there is "
            "nothing to approximate"
        )
    return [replace(call, name=names.get(i, ""), dropout_p=0.0) for i, call in enumerate(capture.calls)]


def given_calls(qkv: Sequence[Any]) -> list[Call]:
    """Calls from tensors: one (q, k, v), or a sequence of (q, k, v) or (q, k, v, scale).

    Example:
        >>> x = torch.randn(1, 2, 5, 4)
        >>> given_calls((x, x, x))[0].scale, len(given_calls([(x, x, x), (x, x, x, 1.0)]))
        (0.5, 2)
    """
    if len(qkv) == 3 and all(isinstance(x, Tensor) for x in qkv):
        qkv = [qkv]
    calls = []
    for i, one in enumerate(qkv):
        if not isinstance(one, tuple | list) or len(one) not in (3, 4):
            raise TypeError(f"layer {i} must be (q, k, v) or (q, k, v, scale), not {type(one).__name__}")
        q, k, v = one[:3]
        scale = one[3] if len(one) == 4 else None
        try:  # one query is enough for all checks
            first = q[..., :1, :] if isinstance(q, Tensor) and q.dim() > 1 else q
            attention(first, k, v, method=Dense(), scale=scale, enable_gqa=True)
        except (TypeError, ValueError) as error:
            raise type(error)(f"layer {i}: {error}") from error
        if q.numel() == 0:
            raise ValueError(f"layer {i}: q has the shape {tuple(q.shape)}, so there is no output to measure")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        calls.append(Call(four_axes(q), four_axes(k), four_axes(v), scale))
    if not calls:
        raise ValueError("there is no layer to tune")
    return calls


def find_call(calls: Sequence[Call], layer: int, head: int = 0, document: int = 0) -> Call:
    """The call of a layer, checked to have this head and this document.

    Raises:
        ValueError: there is no such layer, head or document.

    Example:
        >>> x = torch.randn(1, 2, 5, 4)
        >>> find_call([Call(x, x, x, 0.5, name="first")], layer=0, head=1).name
        'first'
    """
    if not 0 <= layer < len(calls):
        raise ValueError(f"{layer=} must be from 0 to {len(calls) - 1}")
    call = calls[layer]
    for name, value, end in (("head", head, call.q.shape[1]), ("document", document, len(call.q))):
        if not 0 <= value < end:
            raise ValueError(f"{name}={value} must be from 0 to {end - 1}")
    return call


@contextmanager
def _through_sdpa(model: nn.Module) -> Iterator[None]:
    """Inside the block, transformers models with another implementation call PyTorch's function."""
    name = "_attn_implementation_internal"
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    configs = [config for config in found.values() if getattr(config, name, None)]
    with ExitStack() as stack:
        used = [getattr(config, name) for config in configs]
        for config, one in zip(configs, used, strict=True):
            stack.enter_context(changed(config, name, "sdpa" if one.startswith("smyrf") else one))
        change: Any = getattr(model, "set_attn_implementation", None)
        if change is not None and any(one != "sdpa" and not one.startswith("smyrf") for one in used):
            change("sdpa")  # raises if the model does not support it
        yield


@contextmanager
def _callers(model: nn.Module, capture: CaptureAttention) -> Iterator[dict[int, str]]:
    """Inside the block, the name of the innermost module that makes each captured call."""
    names: dict[int, str] = {}
    starts: list[int] = []
    handles = []
    for name, module in model.named_modules():

        def enter(*_: Any) -> None:
            starts.append(len(capture.calls))

        def leave(*_: Any, name: str = name) -> None:
            for call in range(starts.pop(), len(capture.calls)):
                names.setdefault(call, name)  # inner modules come first

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()
