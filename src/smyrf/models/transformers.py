"""transformers: the attention function and the mask function "smyrf", and where in a model they are used.

After ``import smyrf.models.transformers`` every model takes ``attn_implementation="smyrf"``, which attends by
`DEFAULT` unless `smyrf.replace_attention` has given a layer another method. Loaded that way nothing is checked: a
model that does not ask transformers for its attention function stays dense. `smyrf.replace_attention` refuses it.

Shapes: batch, heads, N queries, M keys, D width, E value width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from smyrf.attention import attention
from smyrf.methods import Dense, Tangent
from smyrf.models.masks import read_mask
from smyrf.models.report import Layer

# By this name a model is loaded, and by the other one its layers are replaced: there a layer that has been given no
# method, of another model with the same config for example, is dense.
NAME, REPLACED = "smyrf", "smyrf_replaced"
DEFAULT = Tangent()
# The attribute by which an attention module knows its `Attached`.
ATTRIBUTE = "_smyrf_attached"
# Attributes of tensors that all layers of a model share: what was found out, or made of them, once.
_WHY_DENSE, _FOUR_AXES, _ZERO = "_smyrf_why_dense", "_smyrf_four_axes", "_smyrf_zero"

NOT_REPLACED = "it was not replaced"
NOT_ASKED = "does not ask transformers for its attention"
POSITION_BIAS = "a bias by position is added to its scores"
ONE_QUERY = "one query: a step of decoding"
CONTINUES = "its queries continue a cache"
WINDOW = "its window is shorter than the text"
OWN_MASK = "its mask is neither padding nor causal"
SHORT = "fewer keys than it was tuned for"

# What an attention function may be handed that changes its result and that neither we nor PyTorch's function can do.
_REFUSED = {
    "softcap": "its scores are capped",
    "s_aux": "it has attention sinks",
    "cache": "it has a paged cache",
    "block_indices": "it chooses blocks of keys itself",
}


class Attached(NamedTuple):
    """What an attention module carries while it is replaced.

    Args:
        layer: its method, and counts of its calls.
        before: configs of the model, each with the implementation that it named before.
    """

    layer: Layer
    before: list[tuple[PreTrainedConfig, str]]


class Found(NamedTuple):
    """An attention module of a model.

    Args:
        name: in the model.
        module: None for a model inside the model whose attention cannot be reached.
        configs: that decide how it attends.
        reason: why it cannot be replaced; "" if it can.
    """

    name: str
    module: nn.Module | None
    configs: tuple[PreTrainedConfig, ...]
    reason: str


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
        None where nothing is hidden but by causality; ``(batch, 1, 1, M)`` for attention that is not causal,
        ``(batch, M)`` for causal attention from the first position on. All else (sliding windows that are shorter
        than the text, packed texts, overlays, queries that continue a cache) is PyTorch's ``(batch, 1, N, M)``,
        with which a layer stays dense.
    """
    tracing = torch.compiler.is_compiling()
    first = not isinstance(q_offset, Tensor) or not tracing
    from_start = first and int(q_offset) == 0 and kv_offset == 0
    # transformers allows to skip a mask only where it is the plain one, or one of a window (`local_size`).
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
            setattr(mask, _WHY_DENSE, OWN_MASK if unlimited and not causal else CONTINUES if unlimited else WINDOW)
        return mask
    if attention_mask is None:
        return None
    missing = kv_length + kv_offset - attention_mask.shape[-1]  # places of a static cache that are not in use yet
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
        module: the layer, which carries its method.
        query: ``(batch, heads, N, D)``.
        key: ``(batch, kv_heads, M, D)``.
        value: ``(batch, kv_heads, M, E)``.
        attention_mask: what `smyrf_mask` returns, or what a user has given in its place.
        kwargs: what the layer hands on; what cannot be honoured raises.

    Returns:
        ``(batch, N, heads, E)``, and None: there are no weights.
    """
    _refuse(module, attention_mask, kwargs)
    attached: Attached | None = getattr(module, ATTRIBUTE, None)
    layer = _unattached(module) if attached is None else attached.layer
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if position_bias is not None and _is_zero(position_bias):
        position_bias = None

    key_mask, causal, reason = _read(query, key, attention_mask, is_causal)
    if position_bias is not None:
        reason = POSITION_BIAS
    reason = layer.reason or reason
    if not reason and key.shape[2] < layer.from_keys:
        reason = SHORT
    if not torch.compiler.is_compiling():
        layer.calls.by_dense(reason) if reason else layer.calls.by_method()
    if reason:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            _four_axes(attention_mask, query.shape[2]),
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
        )
    if causal and key.shape[2] > query.shape[2]:  # places of a static cache that are not in use yet
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        key_mask = None if key_mask is None else key_mask[:, : query.shape[2]]
    out = attention(
        query,
        key,
        value,
        method=layer.method,
        key_mask=key_mask,
        is_causal=causal,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=True,
    )  # (batch, heads, N, E)
    return out.transpose(1, 2).contiguous(), None


def _unattached(module: nn.Module) -> Layer:
    """What a layer does that nothing was said of."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
    return Layer("", Dense(), reason=NOT_REPLACED) if implementation == REPLACED else Layer("", DEFAULT)


def find_attention(model: nn.Module) -> list[Found]:
    """The attention modules of all transformers models in a module, in the order of its modules."""
    found = []
    for name, module, parents in _with_parents(model):
        owners = [parent for parent in parents if isinstance(parent, PreTrainedModel)]
        kind = type(module).__name__
        if isinstance(module, PreTrainedModel):
            if not module._can_set_attn_implementation() and all(one._can_set_attn_implementation() for one in owners):
                found.append(Found(name, None, (), f"{kind} {NOT_ASKED}"))
            continue
        if not owners or not owners[-1]._can_set_attn_implementation():
            continue
        if not _dispatches(module):
            if _attends(module):
                found.append(Found(name, None, (), f"{kind} {NOT_ASKED}"))
            continue
        reason = ""
        if not owners[-1]._supports_sdpa:
            reason = f"{type(owners[-1]).__name__} does not support scaled_dot_product_attention"
        elif _has_position_bias(module, name):
            reason = POSITION_BIAS
        configs = [getattr(one, "config", None) for one in (module, *reversed(parents))]
        found.append(
            Found(name, module, tuple(config for config in configs if isinstance(config, PreTrainedConfig)), reason)
        )
    return found


def window(module: nn.Module) -> int | None:
    """Tokens that a layer looks back, beyond which it is dense; None if it sees all."""
    size = getattr(module, "sliding_window", None)
    if not hasattr(module, "sliding_window") and "sliding_window" in _source(type(module).forward):
        size = getattr(getattr(module, "config", None), "sliding_window", None)  # all layers have it, as in Mistral
    return size if isinstance(size, int) and size > 0 else None


def _with_parents(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Module]]]:
    """Name and module of all modules, each with those that it is in, outermost first."""
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
    """Whether a module asks transformers for its attention function: its source says so, or that of a class above."""
    for kind in type(module).__mro__:
        if "forward" in vars(kind):
            source = _source(vars(kind)["forward"])
            if "ALL_ATTENTION_FUNCTIONS" in source or "super()" not in source:
                return "ALL_ATTENTION_FUNCTIONS" in source
    return False


def _attends(module: nn.Module) -> bool:
    """Whether a module attends by itself, as far as its source says."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    source = _source(type(module).forward)
    return "Att" in type(module).__name__ and ("scaled_dot_product_attention(" in source or "softmax(" in source)


def _has_position_bias(module: nn.Module, name: str) -> bool:
    """Whether a layer adds a bias to its scores that depends on positions."""
    if any(
        getattr(module, one, None) is not None for one in ("relative_position_bias", "relative_position_bias_table")
    ):
        return True
    # T5 and its kin hand one over in all layers, of zeros in cross-attention.
    return "position_bias=position_bias" in _source(type(module).forward) and not name.endswith("EncDecAttention")


def _refuse(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raises on what would change the result and cannot be honoured."""
    kind = type(module).__name__
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} was given to {kind}: {what}, which smyrf cannot do; use dense attention")
    if kwargs.get("output_attentions"):
        raise ValueError(
            f"output_attentions=True was given to {kind}, but there are no N × M weights to return: use "
            "attn_implementation='eager' for them"
        )
    if kwargs.get("cu_seq_lens_q") is not None and (mask is None or mask.dim() != 4):
        raise ValueError(
            f"cu_seq_lens_q was given to {kind}, which packs texts into one row: give position_ids that start again "
            "with each text, or an attention_mask and no packing"
        )


def _read(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor | None, bool, str]:
    """Key mask, causal flag, and why the call has to be dense."""
    batch, _, n_queries, _ = query.shape
    n_keys = key.shape[2]
    if n_queries == 1:
        return None, False, ONE_QUERY
    if mask is None:
        return None, is_causal, ""
    if mask.dim() == 2 and mask.dtype == torch.bool:  # from `smyrf_mask`, whatever the layer says of itself
        return mask, True, ""
    if mask.dim() != 4:
        raise ValueError(
            f"attention_mask has the shape {tuple(mask.shape)} and the dtype {mask.dtype}, but it must be 2-D and bool "
            "or have four axes"
        )
    if mask.shape[1] == mask.shape[2] == 1 and mask.dtype == torch.bool:
        return mask[:, 0, 0].expand(batch, n_keys), False, ""
    known: str | None = getattr(mask, _WHY_DENSE, None)
    if known is not None:
        return None, False, known
    return read_mask(mask, batch, n_queries, n_keys)


def _four_axes(mask: Tensor | None, n_queries: int) -> Tensor | None:
    """A mask as PyTorch's function takes it; made once for all layers that share it."""
    if mask is None or mask.dim() != 2:
        return mask
    made: Tensor | None = getattr(mask, _FOUR_AXES, None)
    if made is None:
        made = mask.new_ones(n_queries, mask.shape[1]).tril() & mask[:, None, None]  # (batch, 1, N, M)
        if not torch.compiler.is_compiling():
            setattr(mask, _FOUR_AXES, made)
    return made


def _is_zero(position_bias: Tensor) -> bool:
    """Whether a bias adds nothing, as in T5's cross-attention; looked at once for all layers that share it."""
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
