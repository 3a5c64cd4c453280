"""`replace_attention`, `restore_attention` and `dense`: another attention for a model's layers, and back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torch import nn

from smyrf.methods import Dense, PerHead
from smyrf.models.assignment import NOT_GIVEN, Choice, Methods, check_methods, choose, choose_backend
from smyrf.models.changed import changed, is_changed
from smyrf.models.diffusers import is_intercepted
from smyrf.models.report import Layer, Report
from smyrf.models.sdpa import innermost, intercept_sdpa
from smyrf.nn import MultiheadAttention, SmyrfAttention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from smyrf.models.transformers import Found

_IMPLEMENTATION = "_attn_implementation_internal"


def replace_attention(model: nn.Module, method: Methods, backend: str | None = None) -> Report:
    """Replace the attention of a transformers model's layers. Weights are not touched.

    Encoders, decoders and encoder–decoders, with padding, causal masks and grouped queries. Decoding steps with a
    cache, sliding windows, biases and masks that are neither padding nor causal stay dense and correct, and the
    report counts them. All checks come before the first change.

    Args:
        model: a transformers model, or a module that contains such models.
        method: one for all layers; the `Plan` of `smyrf.tune`; a mapping from layer names to methods, which leaves
            other layers dense; or a sequence, one for each layer in the report's order.
        backend: as in `smyrf.attention`; a plan's own by default. If one is named, it also serves calls for which the
            method is exact; otherwise those stay dense.

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
    backend = choose_backend(method, backend)
    found = _find(model)
    able = [one for one in found if one.reason is None]
    kind = type(model).__name__
    if not able:
        why = "; ".join(dict.fromkeys(one.detail for one in found)) or f"{kind} has no attention layer of transformers"
        raise ValueError(
            f"model: no attention layer of {kind} can be replaced: {why} (smyrf.intercept_sdpa serves code that calls "
            "F.scaled_dot_product_attention)"
        )
    names = [one.name for one in found if one.module is not None]
    choices = choose(method, names, {one.name: one.detail for one in found if one.reason is not None})

    from smyrf.models.transformers import ATTRIBUTE, REPLACED, Attached, window

    _check_heads(found, choices)
    before = _before(model, found)
    _refuse_inside_dense(before)
    layers = []
    for one in found:
        chosen = choices.get(one.name, NOT_GIVEN)
        reason, detail = (chosen.reason, chosen.detail) if one.reason is None else (one.reason, one.detail)
        limit = None if one.module is None else window(one.module)
        its = Dense() if reason else chosen.method
        layers.append(Layer(one.name, its, chosen.min_keys, limit, reason, detail))
    for one, layer in zip(found, layers, strict=True):
        if one.module is not None:
            setattr(one.module, ATTRIBUTE, Attached(layer, before, backend))
    # If all stay dense nothing is switched: not even the time of a function call is lost.
    switched = [config for one in able for config in one.configs] if any(layer.replaced for layer in layers) else []
    for config, implementation in before:
        config._attn_implementation_internal = implementation
    for config in switched:
        config._attn_implementation_internal = REPLACED
    return Report(kind, tuple(layers))


def restore_attention(model: nn.Module) -> None:
    """Restore the attention that a model had before `replace_attention`.

    A model loaded with ``attn_implementation="smyrf"`` becomes dense; any other is left alone.

    Example:
        >>> import smyrf, torch
        >>> smyrf.restore_attention(torch.nn.Linear(2, 2))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not _may_have_transformers():
        return
    from smyrf.models.transformers import ATTRIBUTE, NAME, REPLACED

    before = _before(model, _find(model))
    _refuse_inside_dense(before)
    for config, implementation in before:
        if config._attn_implementation in (NAME, REPLACED):  # an implementation set by the user meanwhile stays
            config._attn_implementation_internal = implementation
    for module in model.modules():
        if hasattr(module, ATTRIBUTE):
            delattr(module, ATTRIBUTE)


@contextmanager
def dense(model: nn.Module) -> Iterator[None]:
    """Inside the block a model is dense, whatever has been replaced; after it everything is as before.

    For layers replaced by `replace_attention`, models loaded with ``attn_implementation="smyrf"``, modules of
    `smyrf.nn`, and inside blocks of `intercept_sdpa` and `intercept_diffusers`. The model itself changes: other
    threads that run it meanwhile see dense attention too. Blocks of interception are left only by this thread.

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
    switched = _before(model, _find(model))
    intercepted = innermost() is not None or any(is_intercepted(module) for module in model.modules())
    with ExitStack() as stack:
        for module in ours:
            stack.enter_context(changed(module, "method", Dense()))
        for config, implementation in switched:
            stack.enter_context(changed(config, _IMPLEMENTATION, implementation))
        if intercepted:
            stack.enter_context(intercept_sdpa(Dense()))
        yield


def _refuse_inside_dense(configs: list[tuple[PreTrainedConfig, str]]) -> None:
    if any(is_changed(config, _IMPLEMENTATION) for config, _ in configs):
        raise ValueError("model is inside a block of smyrf.dense(model): leave it first")


def _check_heads(found: list[Found], choices: dict[str, Choice]) -> None:
    """Raises if a method for each head does not fit the number of heads in a layer's config."""
    for one in found:
        method = choices.get(one.name, NOT_GIVEN).method
        heads = getattr(one.configs[0], "num_attention_heads", None) if one.configs else None
        if isinstance(method, PerHead) and isinstance(heads, int) and len(method.methods) != heads:
            raise ValueError(
                f"method of {one.name!r} has {len(method.methods)} methods, but the layer has {heads} heads"
            )


def _may_have_transformers() -> bool:
    """Whether the library has been imported, without which no model can be one of its models."""
    return "transformers" in sys.modules


def _find(model: nn.Module) -> list[Found]:
    if not _may_have_transformers():
        return []
    from smyrf.models.transformers import find_attention

    return find_attention(model)


def _before(model: nn.Module, found: list[Found]) -> list[tuple[PreTrainedConfig, str]]:
    """The configs that decide how a model attends, each with the implementation before any replacement."""
    if not _may_have_transformers():
        return []
    from smyrf.models.transformers import ATTRIBUTE, NAME, REPLACED

    known: dict[int, tuple[PreTrainedConfig, str]] = {}
    for module in model.modules():
        if hasattr(module, ATTRIBUTE):
            known |= {id(config): (config, was) for config, was in getattr(module, ATTRIBUTE).before}
    for one in found:
        for config in one.configs:
            was = config._attn_implementation
            known.setdefault(id(config), (config, "sdpa" if was in (NAME, REPLACED) else was))
    return list(known.values())
