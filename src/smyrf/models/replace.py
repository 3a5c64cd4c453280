"""One line in, one line out: another attention for a model's layers, and back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from smyrf.methods import Dense, Method, check_method
from smyrf.models.report import Layer, Report
from smyrf.nn import MultiheadAttention, SmyrfAttention
from smyrf.tuning.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from smyrf.models.transformers import Found

Methods: TypeAlias = Method | Plan | Mapping[str, Method] | Sequence[Method]

ASKED = "Dense was asked for"
NOT_GIVEN = "no method was given for it"


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
    _check(method)
    found = _find(model)
    able = [one for one in found if not one.reason]
    kind = type(model).__name__
    if not able:
        why = "; ".join(dict.fromkeys(one.reason for one in found)) or f"{kind} has no attention layer of transformers"
        raise ValueError(
            f"model: no attention layer of {kind} can be replaced: {why} (smyrf.intercept_sdpa serves code that calls "
            "F.scaled_dot_product_attention)"
        )
    choices = _choose(method, [one.name for one in found if one.module is not None])

    from smyrf.models.transformers import ATTRIBUTE, NAME, Attached, window

    layers = []
    for one in found:
        chosen, from_keys, reason = choices.get(one.name, (Dense(), 0, one.reason or NOT_GIVEN))
        reason = one.reason or reason
        limit = None if one.module is None else window(one.module)
        layers.append(Layer(one.name, Dense() if reason else chosen, from_keys, limit, reason))
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

    For layers that `replace_attention` has replaced, for models loaded with ``attn_implementation="smyrf"``, and for
    modules of `smyrf.nn`. It is the model that changes: other threads that run it meanwhile see dense attention too.

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
    try:
        for module in ours:
            module.method = Dense()
        for config, implementation in switched:
            config._attn_implementation_internal = implementation
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


def _check(method: object) -> None:
    if isinstance(method, Plan):
        return
    if isinstance(method, Mapping):
        for name, one in method.items():
            if not isinstance(name, str):
                raise TypeError(f"method: {name!r} must be the name of a layer")
            check_method(one)
        return
    if isinstance(method, Sequence) and not isinstance(method, str):
        for one in method:
            check_method(one)
        return
    check_method(method)


def _choose(method: Methods, names: list[str]) -> dict[str, tuple[Method, int, str]]:
    """For layers by name: the method, the number of keys it is used from on, and why the layer stays dense."""
    if isinstance(method, Plan):
        return _planned(method, names)
    if isinstance(method, Mapping):
        for name in method:
            if name not in names:
                raise ValueError(f"method: there is no layer {name!r}; the layers are {', '.join(names)}")
        chosen = dict(method)
    elif isinstance(method, Sequence):
        if len(method) != len(names):
            raise ValueError(
                f"method has {len(method)} methods for the {len(names)} attention layers of the model: "
                f"{', '.join(names)}; a plan of smyrf.tune is given as a whole"
            )
        chosen = dict(zip(names, method, strict=True))
    else:
        chosen = dict.fromkeys(names, method)
    return {name: (one, 0, ASKED if isinstance(one, Dense) else "") for name, one in chosen.items()}


def _planned(plan: Plan, names: list[str]) -> dict[str, tuple[Method, int, str]]:
    """What a plan says of the layers; it may have been made for a part of the model, or for a model around it."""
    chosen: dict[str, tuple[Method, int, str]] = {}
    if not any(layer.name for layer in plan.layers):
        raise ValueError("method: the plan was made from q, k and v and does not name layers: give plan.methods")
    costs: dict[str, float] = {}
    for layer in plan.layers:
        fits = [
            name
            for name in names
            if name == layer.name or name.endswith("." + layer.name) or layer.name.endswith("." + name)
        ]
        if len(fits) != 1:
            what = "no layer" if not fits else f"the layers {', '.join(fits)} alike"
            raise ValueError(f"method: {layer.name!r} of the plan fits {what}; the layers are {', '.join(names)}")
        # A module that is called several times, as in ALBERT, has to be good enough for each call.
        cost = layer.key_visits / layer.n_keys
        if cost >= costs.get(fits[0], 0.0):
            costs[fits[0]] = cost
            reason = layer.reason if isinstance(layer.method, Dense) else ""
            chosen[fits[0]] = (layer.method, layer.from_keys, reason)
    return chosen
