"""`Plan`: a method for each attention call of a model, as chosen by `tune`, with its JSON and its report."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from smyrf.atomic_write import write_json
from smyrf.methods import Method, check_method, method_from_dict

COLUMNS = ("layer", "method", "key visits", "error", "speed-up", "why")


@dataclass(frozen=True)
class LayerPlan:
    """The choice for one attention call.

    Args:
        index: of the call in the model, from 0.
        method: chosen for it.
        key_visits: mean key visits per query, out of `n_keys`.
        error: estimated relative error of the output, on the worst document.
        speedup: expected, over dense attention; None if it was not measured.
        reason: why this method was chosen.
        name: of the module in the model that makes the call; "" if it is not known.
        from_keys: with fewer keys dense attention is as fast; 0 if times were not measured.

    Example:
        >>> from smyrf import Tangent
        >>> LayerPlan(0, Tangent(0.25), 128, 512, 0.08, 1.4, "cheapest that fits").cells()
        ('0', 'Tangent 25%', '128 of 512', '0.080', '1.40', 'cheapest that fits')
    """

    index: int
    method: Method
    key_visits: int
    n_keys: int
    error: float
    speedup: float | None
    reason: str
    name: str = ""
    from_keys: int = 0

    def cells(self) -> tuple[str, ...]:
        """The row of a table with `COLUMNS`."""
        return (
            str(self.index),
            self.method.label,
            f"{self.key_visits} of {self.n_keys}",
            f"{self.error:.3f}",
            "" if self.speedup is None else f"{self.speedup:.2f}",
            self.reason,
        )


@dataclass(frozen=True)
class Plan:
    """A method for each attention call of a model, in the order of the calls.

    Args:
        layers: the choices.
        max_error: the target for each layer.
        machine: on which times were measured; "" if they were not.
        backend: with which errors and times were measured; None for the best.

    Example:
        >>> from smyrf import Tangent
        >>> layer = LayerPlan(0, Tangent(0.25), 128, 512, 0.08, None, "cheapest that fits")
        >>> plan = Plan((layer,), max_error=0.1, machine="")
        >>> plan.methods[0].budget, plan.memory_share
        (0.25, 0.25)
        >>> print(plan)
        layer  method       key visits  error  speed-up  why
        0      Tangent 25%  128 of 512  0.080            cheapest that fits
        1 layer, max_error=0.1: 25.0% of the keys visited
    """

    layers: tuple[LayerPlan, ...]
    max_error: float
    machine: str
    backend: str | None = None

    @property
    def methods(self) -> tuple[Method, ...]:
        """One per attention call, in order."""
        return tuple(layer.method for layer in self.layers)

    @property
    def memory_share(self) -> float:
        """Key visits as a share of the keys, averaged over layers."""
        return fmean(layer.key_visits / layer.n_keys for layer in self.layers)

    @property
    def summary(self) -> str:
        """The last line of the report."""
        text = f"{len(self.layers)} layer{'s' * (len(self.layers) > 1)}, max_error={self.max_error}: "
        text += f"{self.memory_share:.1%} of the keys visited"
        return f"{text}; {self.machine}" if self.machine else text

    def __str__(self) -> str:
        rows = [COLUMNS, *(layer.cells() for layer in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, self.summary])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON, under a temporary name first: a killed run leaves the old file or the new one."""
        rows = [{**vars(layer), "method": layer.method.to_dict()} for layer in self.layers]
        backend = {} if self.backend is None else {"backend": self.backend}
        write_json(Path(path), {"max_error": self.max_error, "machine": self.machine, **backend, "layers": rows})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads the file that `save` writes.

        Raises:
            ValueError: names the file and the mistake in it.
        """
        try:
            data = json.loads(Path(path).read_text())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        try:
            _check_names(data, Plan)
            if not isinstance(data["layers"], list) or not data["layers"]:
                raise ValueError("layers must be a list of layers")
            layers = tuple(_layer(i, one) for i, one in enumerate(data["layers"]))
            max_error = _number("max_error", data["max_error"])
            if not 0.0 < max_error < 1.0:
                raise ValueError(f"{max_error=} must be between 0 and 1")
            backend = data.get("backend")
            if backend is not None and not isinstance(backend, str):
                raise ValueError(f"{backend=} is not a name")
            return cls(layers, max_error, _text("machine", data["machine"]), backend)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a plan: {error}") from error


def _layer(i: int, data: Any) -> LayerPlan:
    try:
        _check_names(data, LayerPlan)
        method = method_from_dict(data["method"])
        check_method(method)
        for name in ("index", "key_visits", "n_keys", "from_keys"):
            least = int(name in ("key_visits", "n_keys"))
            if type(data[name]) is not int or not least <= data[name] < 2**63:
                raise ValueError(f"{name}={data[name]!r:.20} is not a count")  # it may have hundreds of digits
        if data["index"] != i:
            raise ValueError(f"index={data['index']} is out of order")
        return LayerPlan(
            data["index"],
            method,
            data["key_visits"],
            data["n_keys"],
            _number("error", data["error"]),
            None if data["speedup"] is None else _number("speedup", data["speedup"]),
            _text("reason", data["reason"]),
            _text("name", data["name"]),
            data["from_keys"],
        )
    except ValueError as error:
        raise ValueError(f"layer {i}: {error}") from error


def _check_names(data: Any, kind: type[Plan] | type[LayerPlan]) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"an object is needed, not {type(data).__name__}")
    names = {field.name for field in fields(kind)}
    if missing := sorted(names - data.keys() - {"backend"}):
        raise ValueError(f"{', '.join(missing)} missing")
    if unknown := sorted(data.keys() - names):
        raise ValueError(f"{', '.join(unknown)} unknown")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name}={value!r:.20} is not a number from 0")
    return float(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{name}={value!r:.20} is not text")
    return value
