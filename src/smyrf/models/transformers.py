"""transformers: the attention function and the mask function "smyrf", and the layers of a model that use them.

After ``import smyrf.models.transformers`` every model accepts ``attn_implementation="smyrf"``, which uses `DEFAULT`
unless `smyrf.replace_attention` has given a layer another method. A model loaded this way is not checked: if it does
not ask transformers for its attention function, it stays dense. `smyrf.replace_attention` refuses such a model.

Shapes: batch, heads, N queries, M keys, D width, E value width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils import logging

from smyrf.call import Call, Reason, why_dense
from smyrf.methods import Dense, Tangent
from smyrf.models.calls import serve
from smyrf.models.masks import read_mask
from smyrf.models.report import Layer

# Models are loaded by the first name and replaced by the second. With the second a layer that was given no method, of
# another model with the same config for example, is dense.
NAME, REPLACED = "smyrf", "smyrf_replaced"
DEFAULT = Tangent()
# The attribute of an attention module that holds its `Attached`.
ATTRIBUTE = "_smyrf_attached"
# Attributes of tensors that all layers of a model share: results that are computed once for all of them.
_WHY_DENSE, _FOUR_AXES, _ZERO = "_smyrf_why_dense", "_smyrf_four_axes", "_smyrf_zero"

# Arguments of an attention function that change its result and that neither we nor PyTorch's function support.
_REFUSED = {
    "softcap": "its scores are capped",
    "s_aux": "it has attention sinks",
    "cache": "it has a paged cache",
    "block_indices": "it selects blocks of keys",
}

logger = logging.get_logger(__name__)


class Attached(NamedTuple):
    """State of a replaced attention module.

    Args:
        layer: its method, and counts of its calls.
        before: configs of the model, each with the implementation that it named before.
        backend: for its calls; None for the best.
    """

    layer: Layer
    before: list[tuple[PreTrainedConfig, str]]
    backend: str | None = None


# Defaults for a layer that was not passed to `replace_attention`. They exist once: traced code must not create them.
_LOADED = Attached(Layer("", DEFAULT), [])
_NOT_REPLACED = Attached(Layer("", Dense(), reason=Reason.NOT_REPLACED), [])


class Found(NamedTuple):
    """An attention module of a model.

    Args:
        name: in the model.
        module: None for a module whose attention cannot be reached.
        configs: that decide how it attends.
        reason: why it cannot be replaced; None if it can.
        detail: the reason as text.
    """

    name: str
    module: nn.Module | None
    configs: tuple[PreTrainedConfig, ...]
    reason: Reason | None
    detail: str = ""


def smyrf_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of one kind of layer, in O(M): which keys are padding. Called by transformers.

    Returns:
        None if nothing is hidden except by causality; ``(batch, 1, 1, M)`` for attention that is not causal,
        ``(batch, M)`` for causal attention from the first position on. Everything else (sliding windows that are
        shorter than the text, packed texts, overlays, queries that continue a cache) is PyTorch's
        ``(batch, 1, N, M)``, for which a layer is dense.
    """
    tracing = torch.compiler.is_compiling()
    first = not isinstance(q_offset, Tensor) or not tracing
    from_start = first and int(q_offset) == 0 and kv_offset == 0
    # transformers allows a mask to be skipped only if it is the plain one, or that of a window (`local_size`).
    unlimited = local_size is None or kv_length < local_size
    windowed = local_size is not None
    causal = allow_is_causal_skip and unlimited and (mask_function is causal_mask_function or windowed)
    plain = allow_is_bidirectional_skip and unlimited and (mask_function is bidirectional_mask_function or windowed)
    if not plain and not (causal and q_length > 1 and from_start):
        mask = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            **kwargs,
        )
        if mask is not None and not tracing:
            own = Reason.CONTINUES if causal else Reason.OTHER_MASK
            setattr(mask, _WHY_DENSE, own if unlimited else Reason.WINDOW)
        return mask
    if attention_mask is None:
        return None
    missing = kv_length + kv_offset - attention_mask.shape[-1]  # slots of a static cache that are not in use yet
    padding = nn.functional.pad(attention_mask, (0, max(missing, 0)))[:, kv_offset : kv_offset + kv_length]
    if not tracing and bool((padding[:, :q_length] if causal else padding).all()):
        return None
    return padding if causal else padding[:, None, None]


def smyrf_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Args:
        module: the layer, which holds its method.
        query: ``(batch, heads, N, D)``.
        key: ``(batch, kv_heads, M, D)``.
        value: ``(batch, kv_heads, M, E)``.
        attention_mask: the result of `smyrf_mask`, or a user's own mask.
        kwargs: passed on by the layer; an argument that cannot be honoured raises.

    Returns:
        ``(batch, N, heads, E)``, and None: there are no attention weights.
    """
    _refuse(module, attention_mask, kwargs)
    if kwargs.get("output_attentions"):
        logger.warning_once(
            "smyrf returns no attention weights for output_attentions=True: load the model with "
            "attn_implementation='eager' to get them"
        )
    attached: Attached = getattr(module, ATTRIBUTE, None) or _default(module)
    layer, backend = attached.layer, attached.backend
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if position_bias is not None and _is_zero(position_bias):
        position_bias = None

    call = Call(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling, dropout_p=dropout)
    reason = layer.reason if position_bias is None else layer.reason or Reason.POSITION_BIAS
    if reason is None:
        call = _read(call, attention_mask, is_causal)
        reason = why_dense(call, layer.method, layer.from_keys, backend)
    if not torch.compiler.is_compiling():
        layer.calls.count(reason)
    if reason is None:
        out = serve(call, layer.method, backend=backend)  # (batch, heads, N, E)
        return out.transpose(1, 2).contiguous(), None
    mask = _four_axes(attention_mask, query.shape[2])
    return sdpa_attention_forward(
        module,
        query,
        key,
        value,
        mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        position_bias=position_bias,
    )


def _default(module: nn.Module) -> Attached:
    """Default for a layer that was not passed to `replace_attention`."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
    return _NOT_REPLACED if implementation == REPLACED else _LOADED


def find_attention(model: nn.Module) -> list[Found]:
    """The attention modules of all transformers models in a module, in module order."""
    found = []
    for name, module, parents in _with_parents(model):
        owners = [parent for parent in parents if isinstance(parent, PreTrainedModel)]
        kind = type(module).__name__
        if isinstance(module, PreTrainedModel):
            if not module._can_set_attn_implementation() and all(one._can_set_attn_implementation() for one in owners):
                found.append(_not_dispatched(name, kind))
            continue
        if not owners or not owners[-1]._can_set_attn_implementation():
            continue
        if not _dispatches(module):
            if _attends(module):
                found.append(_not_dispatched(name, kind))
            continue
        reason, detail = None, ""
        if not owners[-1]._supports_sdpa:
            reason = Reason.NO_SDPA
            detail = f"{type(owners[-1]).__name__} does not support scaled_dot_product_attention"
        elif _has_position_bias(module, name):
            reason = Reason.POSITION_BIAS
            detail = str(reason)
        above = [getattr(one, "config", None) for one in (module, *reversed(parents))]
        configs = tuple(config for config in above if isinstance(config, PreTrainedConfig))
        found.append(Found(name, module, configs, reason, detail))
    return found


def _not_dispatched(name: str, kind: str) -> Found:
    return Found(name, None, (), Reason.NOT_DISPATCHED, f"{kind} does not ask transformers for its attention")


def window(module: nn.Module) -> int | None:
    """The sliding window of a layer in tokens, beyond which it is dense; None if it has none."""
    size = getattr(module, "sliding_window", None)
    if not hasattr(module, "sliding_window") and "sliding_window" in _source(type(module).forward):
        size = getattr(getattr(module, "config", None), "sliding_window", None)  # all layers have it, as in Mistral
    return size if isinstance(size, int) and size > 0 else None


def _with_parents(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Module]]]:
    """Name and module of all modules, each with the modules that contain it, outermost first."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parts = name.split(".") if name else []
        above = [".".join(parts[:i]) for i in range(len(parts))]
        yield name, module, [modules[one] for one in above if one in modules]


@cache
def _source(forward: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(forward)
    except (OSError, TypeError):  # made at run time, or without a source
        return ""


def _dispatches(module: nn.Module) -> bool:
    """Whether a module asks transformers for its attention function, by its source or that of a base class."""
    for kind in type(module).__mro__:
        if "forward" in vars(kind):
            source = _source(vars(kind)["forward"])
            if "ALL_ATTENTION_FUNCTIONS" in source or "super()" not in source:
                return "ALL_ATTENTION_FUNCTIONS" in source
    return False


def _attends(module: nn.Module) -> bool:
    """Whether a module computes attention itself, as far as its source shows."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    source = _source(type(module).forward)
    return "Att" in type(module).__name__ and ("scaled_dot_product_attention(" in source or "softmax(" in source)


def _has_position_bias(module: nn.Module, name: str) -> bool:
    """Whether a layer adds a position bias to its scores."""
    if any(
        getattr(module, one, None) is not None for one in ("relative_position_bias", "relative_position_bias_table")
    ):
        return True
    # T5 and related models pass one in all layers, all zeros in cross-attention.
    return "position_bias=position_bias" in _source(type(module).forward) and not name.endswith("EncDecAttention")


def _refuse(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raises on arguments that would change the result and cannot be honoured."""
    kind = type(module).__name__
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} was given to {kind}: {what}, which smyrf does not support; use dense attention")
    if kwargs.get("cu_seq_lens_q") is not None and (mask is None or mask.dim() != 4):
        raise ValueError(
            f"cu_seq_lens_q was given to {kind}, which packs texts into one row: give position_ids that start again "
            "with each text, or an attention_mask and no packing"
        )


def _read(call: Call, mask: Tensor | None, is_causal: bool) -> Call:
    """The call with its mask and causality."""
    if call.n_queries == 1:
        return call
    if mask is None:
        return _causal(call) if is_causal else call
    if mask.dim() == 2 and mask.dtype == torch.bool:  # from `smyrf_mask`, whatever the layer's own flag is
        return _causal(replace(call, key_mask=mask))
    if mask.dim() != 4:
        raise ValueError(
            f"attention_mask has the shape {tuple(mask.shape)} and the dtype {mask.dtype}, but it must be 2-D and bool "
            "or have four axes"
        )
    if mask.shape[1] == mask.shape[2] == 1 and mask.dtype == torch.bool:  # no need to look at the data
        return replace(call, key_mask=mask[:, 0, 0].expand(call.q.shape[0], call.n_keys))
    # Looking at the data would break a compiled graph.
    known = Reason.OTHER_MASK if torch.compiler.is_compiling() else getattr(mask, _WHY_DENSE, None)
    return read_mask(call, mask) if known is None else replace(call, only_dense=known)


def _causal(call: Call) -> Call:
    """The causal call, without the slots of a static cache that are not in use yet."""
    n = call.n_queries
    if call.n_keys > n:
        key_mask = None if call.key_mask is None else call.key_mask[:, :n]
        call = replace(call, k=call.k[:, :, :n], v=call.v[:, :, :n], key_mask=key_mask)
    return replace(call, is_causal=True)


def _four_axes(mask: Tensor | None, n_queries: int) -> Tensor | None:
    """A mask as PyTorch's function takes it, made once for all layers that share it."""
    if mask is None or mask.dim() != 2:
        return mask
    made: Tensor | None = getattr(mask, _FOUR_AXES, None)
    if made is None:
        made = mask.new_ones(n_queries, mask.shape[1]).tril() & mask[:, None, None]  # (batch, 1, N, M)
        if not torch.compiler.is_compiling():
            setattr(mask, _FOUR_AXES, made)
    return made


def _is_zero(position_bias: Tensor) -> bool:
    """Whether a bias is zero, as in T5's cross-attention; computed once for all layers that share it."""
    if position_bias.requires_grad:
        return False
    known: bool | None = getattr(position_bias, _ZERO, None)
    if known is None:
        known = not bool(position_bias.any())
        if not torch.compiler.is_compiling():
            setattr(position_bias, _ZERO, known)
    return known


for _name in (NAME, REPLACED):
    AttentionInterface.register(_name, smyrf_attention)
    AttentionMaskInterface.register(_name, smyrf_mask)
