"""One line in, one line out: another attention for a model's layers, and back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torch import nn

from smyrf.methods import Dense, PerHead
from smyrf.models.assignment import NOT_GIVEN, Choice, Methods, check_methods, choose
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

    from smyrf.models.transformers import ATTRIBUTE, REPLACED, Attached, window

    _check_heads(found, choices)
    before = _before(model)
    _refuse_inside_dense(before)
    layers = []
    for one in found:
        chosen = choices.get(one.name, NOT_GIVEN)
        reason = one.reason or chosen.reason
        limit = None if one.module is None else window(one.module)
        layers.append(Layer(one.name, Dense() if reason else chosen.method, chosen.from_keys, limit, reason))
    for one, layer in zip(found, layers, strict=True):
        if one.module is not None:
            setattr(one.module, ATTRIBUTE, Attached(layer, before))
    # Where all stay dense nothing is switched: not even the time of a function call is lost.
    switched = [config for one in able for config in one.configs] if any(layer.replaced for layer in layers) else []
    for config, implementation in before:
        config._attn_implementation_internal = implementation
    for config in switched:
        config._attn_implementation_internal = REPLACED
    return Report(kind, tuple(layers))


def restore_attention(model: nn.Module) -> None:
    """Gives a model back the attention that it had before `replace_attention`.

    One that was loaded with ``attn_implementation="smyrf"`` becomes dense; any other is left alone.

    Example:
        >>> import smyrf, torch
        >>> smyrf.restore_attention(torch.nn.Linear(2, 2))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not _may_have_transformers():
        return
    from smyrf.models.transformers import ATTRIBUTE, NAME, REPLACED

    before = _before(model)
    _refuse_inside_dense(before)
    for config, implementation in before:
        if config._attn_implementation in (NAME, REPLACED):  # what a user has set since then stays
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
    switched = _before(model) if _may_have_transformers() else []
    intercepted = innermost() is not None or any(is_intercepted(module) for module in model.modules())
    changes: list[tuple[object, str, object]] = [(module, "method", Dense()) for module in ours]
    changes += [(config, "_attn_implementation_internal", was) for config, was in switched]
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(_changed(owner, name, value))
        if intercepted:
            stack.enter_context(intercept_sdpa(Dense()))
        yield


# What blocks of `dense` have changed, by the identity of its owner: the owner, how many blocks, and what was there.
_inside_dense: dict[int, tuple[object, int, object]] = {}
_lock = threading.Lock()


@contextmanager
def _changed(owner: object, name: str, value: object) -> Iterator[None]:
    """Another attribute inside the block; of blocks that overlap the first remembers, and the last puts back."""
    with _lock:
        _, depth, before = _inside_dense.get(id(owner), (owner, 0, getattr(owner, name)))
        _inside_dense[id(owner)] = (owner, depth + 1, before)
        setattr(owner, name, value)
    try:
        yield
    finally:
        with _lock:
            _, depth, before = _inside_dense.pop(id(owner))
            if depth > 1:
                _inside_dense[id(owner)] = (owner, depth - 1, before)
            else:
                setattr(owner, name, before)


def _refuse_inside_dense(configs: list[tuple[PreTrainedConfig, str]]) -> None:
    if any(id(config) in _inside_dense for config, _ in configs):
        raise ValueError("model is inside a block of smyrf.dense(model): leave it first")


def _check_heads(found: list[Found], choices: dict[str, Choice]) -> None:
    """Raises where a method for each head does not fit the heads that a layer's config says it has."""
    for one in found:
        method = choices.get(one.name, NOT_GIVEN).method
        heads = getattr(one.configs[0], "num_attention_heads", None) if one.configs else None
        if isinstance(method, PerHead) and isinstance(heads, int) and len(method.methods) != heads:
            raise ValueError(
                f"method of {one.name!r} has {len(method.methods)} methods, but the layer has {heads} heads"
            )


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
    from smyrf.models.transformers import ATTRIBUTE, NAME, REPLACED

    known: dict[int, tuple[PreTrainedConfig, str]] = {}
    for module in model.modules():
        if hasattr(module, ATTRIBUTE):
            known |= {id(config): (config, was) for config, was in getattr(module, ATTRIBUTE).before}
    for one in _find(model):
        for config in one.configs:
            was = config._attn_implementation
            known.setdefault(id(config), (config, "sdpa" if was in (NAME, REPLACED) else was))
    return list(known.values())
