"""Which layer gets which method: one for all, one for each, or those of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from smyrf.backends import check_backend
from smyrf.call import Reason
from smyrf.methods import Dense, Method, check_method
from smyrf.models.plan import Plan

Methods: TypeAlias = Method | Plan | Mapping[str, Method] | Sequence[Method]


class Choice(NamedTuple):
    """What was chosen for one layer.

    Args:
        method: of the layer.
        min_keys: with fewer keys the layer is dense.
        reason: why the layer stays dense; None if it is replaced.
        detail: the reason in the words of a plan; "" if `reason` says it all.
    """

    method: Method
    min_keys: int = 0
    reason: Reason | None = None
    detail: str = ""


NOT_GIVEN = Choice(Dense(), reason=Reason.NOT_GIVEN)


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


def choose_backend(method: Methods, backend: str | None) -> str | None:
    """The named backend, or the one that a plan was made with; raises if it is not available.

    Example:
        >>> choose_backend(Dense(), "torch")
        'torch'
    """
    if backend is None and isinstance(method, Plan):
        backend = method.backend
    check_backend(backend)
    return backend


def choose(method: Methods, names: Sequence[str], unable: Mapping[str, str]) -> dict[str, Choice]:
    """The choice for each layer of a model; a layer that is missing in it was given no method.

    Args:
        names: of all layers.
        unable: layers that have to stay dense, and why; asking for one of them by name raises.

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
            if name in unable and not one.is_dense:
                raise ValueError(f"method: layer {name!r} cannot use another method: {unable[name]}")
        chosen = dict(method)
    elif isinstance(method, Sequence):
        if len(method) != len(names):
            raise ValueError(
                f"method has {len(method)} methods for the {len(names)} attention layers of the model: "
                f"{', '.join(names)}; pass a plan of smyrf.tune as a whole"
            )
        chosen = dict(zip(names, method, strict=True))
    else:
        chosen = dict.fromkeys(names, method)
    return {name: Choice(one, reason=Reason.ASKED if one.is_dense else None) for name, one in chosen.items()}


def _planned(plan: Plan, names: Sequence[str], unable: Mapping[str, str]) -> dict[str, Choice]:
    """The choices of a plan, which may have been made for a part of the model or for a model around it."""
    chosen: dict[str, Choice] = {}
    if not any(layer.name for layer in plan.layers):
        raise ValueError("method: the plan was made from q, k and v and does not name layers: pass plan.methods")
    costs: dict[str, float] = {}
    for layer in plan.layers:
        fits = [layer.name] if layer.name in names else [name for name in names if _same(name, layer.name)]
        if not fits and any(_same(name, layer.name) for name in unable):
            continue  # a call that cannot be replaced: the report lists it
        if len(fits) != 1:
            what = "no layer" if not fits else f"the layers {', '.join(fits)} alike"
            raise ValueError(f"method: {layer.name!r} of the plan fits {what}; the layers are {', '.join(names)}")
        # A module that is called several times, as in ALBERT, needs the costliest of its methods.
        cost = layer.key_visits / layer.n_keys
        if cost >= costs.get(fits[0], 0.0):
            costs[fits[0]] = cost
            reason, detail = (Reason.PLANNED, layer.reason) if layer.method.is_dense else (None, "")
            chosen[fits[0]] = Choice(layer.method, layer.from_keys, reason, detail)
    return chosen


def _same(name: str, planned: str) -> bool:
    """Whether two names are of one layer, one of them perhaps in an enclosing model."""
    return name == planned or name.endswith("." + planned) or planned.endswith("." + name)
