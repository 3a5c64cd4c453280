"""Which layer gets which method: one for all, one each, or what a plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from smyrf.methods import Dense, Method, check_method
from smyrf.models.plan import Plan

Methods: TypeAlias = Method | Plan | Mapping[str, Method] | Sequence[Method]


class Choice(NamedTuple):
    """What one layer is to attend by.

    Args:
        method: of the layer.
        from_keys: with fewer keys than this it stays dense.
        reason: why it stays dense altogether; "" if it does not.
    """

    method: Method
    from_keys: int
    reason: str


NOT_GIVEN = Choice(Dense(), 0, "no method was given for it")
ASKED = "Dense was asked for"


def check_methods(method: object) -> None:
    """Raises unless these are methods for layers, whatever the layers are."""
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


def choose(method: Methods, names: Sequence[str], unable: Mapping[str, str]) -> dict[str, Choice]:
    """The choices for the layers of a model; layers that are missing in it were given none.

    Args:
        names: of all layers.
        unable: why some of them have to stay dense; one that is asked for by its name raises.

    Raises:
        ValueError: the methods do not fit the layers.

    Example:
        >>> import smyrf
        >>> choose({"layers.1": smyrf.Tangent(0.5)}, ["layers.0", "layers.1"], {})["layers.1"].method.budget
        0.5
    """
    if isinstance(method, Plan):
        return _planned(method, names, unable)
    if isinstance(method, Mapping):
        if not method:
            raise ValueError(f"method={method!r} gives no layer a method; the layers are {', '.join(names)}")
        for name, one in method.items():
            if name not in names:
                raise ValueError(f"method: there is no layer {name!r}; the layers are {', '.join(names)}")
            if name in unable and not isinstance(one, Dense):
                raise ValueError(f"method: layer {name!r} cannot attend by another method: {unable[name]}")
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
    return {name: Choice(one, 0, ASKED if isinstance(one, Dense) else "") for name, one in chosen.items()}


def _planned(plan: Plan, names: Sequence[str], unable: Mapping[str, str]) -> dict[str, Choice]:
    """What a plan says of the layers; it may have been made for a part of the model, or for a model around it."""
    chosen: dict[str, Choice] = {}
    if not any(layer.name for layer in plan.layers):
        raise ValueError("method: the plan was made from q, k and v and does not name layers: give plan.methods")
    costs: dict[str, float] = {}
    for layer in plan.layers:
        fits = [layer.name] if layer.name in names else [name for name in names if _same(name, layer.name)]
        if not fits and any(_same(name, layer.name) for name in unable):
            continue  # a call that cannot be replaced: the report lists it
        if len(fits) != 1:
            what = "no layer" if not fits else f"the layers {', '.join(fits)} alike"
            raise ValueError(f"method: {layer.name!r} of the plan fits {what}; the layers are {', '.join(names)}")
        # A module that is called several times, as in ALBERT, has to be good enough for each call.
        cost = layer.key_visits / layer.n_keys
        if cost >= costs.get(fits[0], 0.0):
            costs[fits[0]] = cost
            reason = layer.reason if isinstance(layer.method, Dense) else ""
            chosen[fits[0]] = Choice(layer.method, layer.from_keys, reason)
    return chosen


def _same(name: str, planned: str) -> bool:
    """Whether two names are of one layer, perhaps in a model inside another."""
    return name == planned or name.endswith("." + planned) or planned.endswith("." + name)
