"""One line in, one line out: another attention for a model's layers, and back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import nn

from smyrf.methods import Dense
from smyrf.models.choice import NOT_GIVEN, Methods, check_methods, choose
from smyrf.models.diffusers import is_intercepted
from smyrf.models.report import Layer, Report
from smyrf.models.sdpa import innermost, intercept_sdpa
from smyrf.nn import MultiheadAttention, SmyrfAttention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from smyrf.models.transformers import Found


def replace_attention(model: nn.Module, method: Methods) -> Report:
    """Has the layers of a transformers model attend by the given method. Weights are not touched.

    Encoders, decoders and encoder–decoders, with padding, causal masks and grouped queries. Steps of decoding with
    a cache, sliding windows, biases and masks that are neither padding nor causal stay dense and correct, and the
    report counts them. All checks come before the first change.

    Args:
        model: a transformers model, or a module with such models in it.
        method: one for all layers; the `Plan` of `smyrf.tune`; a mapping from names of layers to methods, in which
            those that are missing stay dense; or a sequence, one for each layer in the report's order.

    Returns:
        the layers that were replaced, and those that were not, each with the reason; calls are counted in it as
        the model runs.

    Raises:
        ValueError: no layer of the model can be replaced, or the methods do not fit its layers.

    Example:
        >>> import smyrf, torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)
        >>> model = BertModel(config).eval()
        >>> print(smyrf.replace_attention(model, smyrf.Tangent(0.25)))
        BertModel: 2 of 2 attention layers replaced
        encoder.layer.0.attention.self  Tangent 25%
        encoder.layer.1.attention.self  Tangent 25%
        >>> model(torch.randint(100, (1, 300))).last_hidden_state.shape
        torch.Size([1, 300, 32])
        >>> smyrf.restore_attention(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    check_methods(method)
    found = _find(model)
    able = [one for one in found if not one.reason]
    kind = type(model).__name__
    if not able:
        why = "; ".join(dict.fromkeys(one.reason for one in found)) or f"{kind} has no attention layer of transformers"
        raise ValueError(
            f"model: no attention layer of {kind} can be replaced: {why} (smyrf.intercept_sdpa serves code that calls "
            "F.scaled_dot_product_attention)"
        )
    names = [one.name for one in found if one.module is not None]
    choices = choose(method, names, {one.name: one.reason for one in found if one.reason})

    from smyrf.models.transformers import ATTRIBUTE, NAME, Attached, window

    layers = []
    for one in found:
        chosen = choices.get(one.name, NOT_GIVEN)
        reason = one.reason or chosen.reason
        limit = None if one.module is None else window(one.module)
        layers.append(Layer(one.name, Dense() if reason else chosen.method, chosen.from_keys, limit, reason))
    before = _before(model)
    for one, layer in zip(found, layers, strict=True):
        if one.module is not None:
            setattr(one.module, ATTRIBUTE, Attached(layer, before))
    # Where all stay dense nothing is switched: not even the time of a function call is lost.
    switched = [config for one in able for config in one.configs] if any(layer.replaced for layer in layers) else []
    for config, implementation in before:
        config._attn_implementation_internal = implementation
    for config in switched:
        config._attn_implementation_internal = NAME
    return Report(kind, tuple(layers))


def restore_attention(model: nn.Module) -> None:
    """Gives a model back the attention that it had before `replace_attention`; an untouched one is left alone.

    Example:
        >>> import smyrf, torch
        >>> smyrf.restore_attention(torch.nn.Linear(2, 2))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not _may_have_transformers():
        return
    from smyrf.models.transformers import ATTRIBUTE

    for config, implementation in _before(model):
        config._attn_implementation_internal = implementation
    for module in model.modules():
        if hasattr(module, ATTRIBUTE):
            delattr(module, ATTRIBUTE)


@contextmanager
def dense(model: nn.Module) -> Iterator[None]:
    """Inside the block a model attends densely, whatever has been replaced; behind it as before.

    For layers that `replace_attention` has replaced, for models loaded with ``attn_implementation="smyrf"``, for
    modules of `smyrf.nn`, and inside blocks of `intercept_sdpa` and `intercept_diffusers`. It is the model that
    changes: other threads that run it meanwhile see dense attention too (of those blocks only this thread is let out).

    Example:
        >>> import smyrf, torch
        >>> layer = smyrf.nn.MultiheadAttention(32, 4, batch_first=True, method=smyrf.Tangent(0.25))
        >>> x = torch.randn(1, 300, 32)
        >>> fast = layer(x, x, x)[0]
        >>> with smyrf.dense(layer):
        ...     exact = layer(x, x, x)[0]
        >>> torch.equal(fast, exact), layer.method
        (False, Tangent(budget=0.25, ...))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    ours = [module for module in model.modules() if isinstance(module, SmyrfAttention | MultiheadAttention)]
    methods = [module.method for module in ours]
    switched = _before(model) if _may_have_transformers() else []
    now = [config._attn_implementation for config, _ in switched]
    intercepted = innermost() is not None or any(is_intercepted(module) for module in model.modules())
    try:
        for module in ours:
            module.method = Dense()
        for config, implementation in switched:
            config._attn_implementation_internal = implementation
        with intercept_sdpa(Dense()) if intercepted else nullcontext():
            yield
    finally:
        for module, method in zip(ours, methods, strict=True):
            module.method = method
        for (config, _), implementation in zip(switched, now, strict=True):
            config._attn_implementation_internal = implementation


def _may_have_transformers() -> bool:
    """Whether a model can be one of transformers: the library has been imported."""
    return "transformers" in sys.modules


def _find(model: nn.Module) -> list[Found]:
    if not _may_have_transformers():
        return []
    from smyrf.models.transformers import find_attention

    return find_attention(model)


def _before(model: nn.Module) -> list[tuple[PreTrainedConfig, str]]:
    """The configs that decide how a model attends, each with what it named before anything was replaced."""
    from smyrf.models.transformers import ATTRIBUTE, NAME

    known: dict[int, tuple[PreTrainedConfig, str]] = {}
    for module in model.modules():
        if hasattr(module, ATTRIBUTE):
            known |= {id(config): (config, was) for config, was in getattr(module, ATTRIBUTE).before}
    for one in _find(model):
        for config in one.configs:
            was = config._attn_implementation
            known.setdefault(id(config), (config, "sdpa" if was == NAME else was))
    return list(known.values())
