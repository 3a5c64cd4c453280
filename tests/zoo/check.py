"""One architecture: replaced, run, compared with dense attention, put back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import smyrf
from smyrf.models.report import Layer, Report
from tests.zoo.architectures import Architecture
from tests.zoo.attending import Attending
from tests.zoo.batches import Batch

EXACT = smyrf.Smyrf(n_hashes=2, cluster_size=4096)  # one cluster: the outputs are those of dense attention
APPROXIMATE = smyrf.Smyrf(n_hashes=2, cluster_size=8)
KERNEL = "torch"  # if a backend is named, it also serves calls for which a method is exact
LARGEST_DIFFERENCE = 1e-4
# What a case has to change by when its attention is wrong: it could not show an error otherwise.
SENSITIVITY = 1e-2
NEW_TOKENS = 8

Outputs = dict[str, Tensor]


class CheckError(Exception):
    """An architecture fails its check."""


@dataclass(frozen=True)
class Row:
    """The result of a check.

    Args:
        architecture: that was checked.
        verdict: replaced, partly or refused.
        n_layers: attention layers.
        n_replaced: of which all calls were served by the method.
        n_heads: pooling heads, which have one query and stay dense; they are no layers.
        padded: whether rows were padded, so that a mask that is lost would have been seen.
        difference: the largest one to dense attention with one cluster, relative to the largest output; None if
            refused.
        generated: whether greedy ``generate`` gave the same tokens; None if the model has none or is refused.
        reasons: why other layers are dense, with counts of layers; for a model that is refused, the error.
    """

    architecture: Architecture
    verdict: str
    n_layers: int
    n_replaced: int
    n_heads: int
    padded: bool
    difference: float | None
    generated: bool | None
    reasons: Mapping[str, int]


def check(architecture: Architecture) -> Row:
    """The row of one architecture.

    Raises:
        CheckError: it differs from dense attention, or cannot be put back, or the case could not show it.
    """
    model, batch = architecture.build(), architecture.batch()
    with torch.inference_mode():
        return _check(architecture, model, batch)


def _check(architecture: Architecture, model: Any, batch: Batch) -> Row:
    with Attending(model) as attending:
        dense = _run(model, batch)
    tokens = _generate(model, batch)
    try:
        report = smyrf.replace_attention(model, EXACT, backend=KERNEL)
    except ValueError as error:
        _require_same(_run(model, batch), dense, "a refused model was changed")
        return Row(architecture, "refused", 0, 0, 0, False, None, None, {str(error): 1})
    difference = _difference(_run(model, batch), dense, batch)
    _require_named(attending, report)
    heads = [layer for layer in report.layers if attending.n_queries.get(layer.name) == 1]
    layers = [layer for layer in report.layers if layer not in heads]
    reasons = sum((_dense_layers(layer, attending) for layer in layers), Counter())
    n_replaced = sum(not _dense_layers(layer, attending) for layer in layers)
    exact_tokens = _generate(model, batch)
    smyrf.restore_attention(model)
    _require_same(_run(model, batch), dense, "restore_attention has not put back what was there")

    if not difference < LARGEST_DIFFERENCE:
        raise CheckError(f"one cluster differs from dense attention by {difference:.1e}")
    smyrf.replace_attention(model, APPROXIMATE, backend=KERNEL)  # short causal attention is exact
    approximate = _run(model, batch)
    smyrf.restore_attention(model)
    if not all(bool(output.isfinite().all()) for output in approximate.values()):
        raise CheckError(f"{APPROXIMATE} gives numbers that are not finite")
    if n_replaced and _difference(approximate, dense, batch) == 0.0:
        raise CheckError(f"{APPROXIMATE} gives the outputs of dense attention: it was not used")
    padded = _require_sensitive(model, batch, dense)

    generated = None if tokens is None or exact_tokens is None else torch.equal(tokens, exact_tokens)
    if generated is False:
        raise CheckError(f"generate() gives {exact_tokens} instead of {tokens}")
    verdict = "replaced" if not reasons else "partly" if n_replaced else "dense"
    n_layers = n_replaced + reasons.total()
    return Row(architecture, verdict, n_layers, n_replaced, len(heads), padded, difference, generated, reasons)


def _is_in(name: str, layer: Layer) -> bool:
    return name == layer.name or name.startswith(f"{layer.name}.")


def _require_named(attending: Attending, report: Report) -> None:
    """A report that is silent about a layer would let people believe that all were replaced."""
    for name in attending.n_queries:
        if not any(_is_in(name, layer) for layer in report.layers):
            raise CheckError(f"{name} computes attention, and the report does not name it")


def _dense_layers(layer: Layer, attending: Attending) -> Counter[str]:
    """How many layers attend densely and why: none, or this one, or all in a model that is named as a whole."""
    if not layer.replaced:
        return Counter({layer.why: max(1, sum(_is_in(name, layer) for name in attending.n_queries))})
    if layer.calls.dense:
        return Counter([", ".join(layer.calls.dense)])
    if not layer.calls.served:
        raise CheckError(f"{layer.name} was replaced, but never ran")
    return Counter()


def _run(model: Any, batch: Batch) -> Outputs:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        result = model(**batch.arguments)
    return {name: reduce(getattr, name.split("."), result) for name in batch.compared}


def _generate(model: Any, batch: Batch) -> Tensor | None:
    if batch.generation is None:
        return None
    given = {name: value.clone() for name, value in batch.generation.items()}  # some models write into them
    tokens = model.generate(**given, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1)
    assert isinstance(tokens, Tensor)
    return tokens


def _differences(outputs: Outputs, expected: Outputs, batch: Batch) -> dict[str, float]:
    """The largest difference of each output where there is no padding, relative to the largest number in it."""
    found = {}
    for name, places in batch.compared.items():
        ours, theirs = outputs[name], expected[name]
        if places is not None:
            ours, theirs = ours[places], theirs[places]
        found[name] = float((ours - theirs).abs().max() / theirs.abs().max())
    return found


def _difference(outputs: Outputs, expected: Outputs, batch: Batch) -> float:
    return max(_differences(outputs, expected, batch).values())


def _require_same(outputs: Outputs, expected: Outputs, what: str) -> None:
    if not all(torch.equal(outputs[name], expected[name]) for name in expected):
        raise CheckError(what)


class _Uniform(TorchFunctionMode):
    """All keys weigh the same."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            args = (args[0] * 0, *args[1:])
        return func(*args, **(kwargs or {}))


class _Unpadded(TorchFunctionMode):
    """All rows see what any of them sees: padding is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        mask = kwargs.get("attn_mask")
        if func is F.scaled_dot_product_attention and mask is not None:
            any_row = mask.amax(0, keepdim=True)
            self.seen |= not bool((mask == any_row).all())
            kwargs["attn_mask"] = any_row
        return func(*args, **kwargs)


def _require_sensitive(model: Any, batch: Batch, dense: Outputs) -> bool:
    """Whether attention saw padding; raises where an output would not have shown a wrong weight or a lost mask."""
    with _Uniform():
        uniform = _differences(_run(model, batch), dense, batch)
    with _Unpadded() as mode:
        unpadded = _differences(_run(model, batch), dense, batch)
    if min(uniform.values()) < SENSITIVITY:
        raise CheckError(f"uniform attention changes the outputs by only {uniform}")
    padded = {name: unpadded[name] for name, places in batch.compared.items() if places is not None} or unpadded
    if mode.seen and min(padded.values()) < SENSITIVITY:
        raise CheckError(f"without masks the outputs change by only {padded}")
    return mode.seen and batch.padded
