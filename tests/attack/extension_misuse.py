"""Misuse of the functions of `smyrf._native` that only they can meet, below all of the package's own checks.

Outputs that overlap inputs or each other, sizes whose products overflow, and tensors that lie about themselves. Tensors
of a call end at guard pages, so that a read or write beyond one ends the process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.attack.extension_shapes import is_output, resized, symbols, too_large
from tests.attack.guarded import guarded
from tests.attack.lies import LIES, LOSES_OUTPUT
from tests.attack.recorded_calls import Recorded, leaves_of, rebuild, with_leaf
from tests.attack.verdict import Case

OVERLAPS = ("from the start", "from the second element")
OVERLAP, ROWS, SIZES = "overlaps", "is one row, repeated", "sizes"


def cases(target: str, one: Recorded) -> Iterator[Case]:
    """All cases of one function of the extension."""
    leaves = leaves_of(one)
    tensors = [name for name, value in leaves.items() if isinstance(value, Tensor)]
    function = function_of(target)
    outputs = [name for name in tensors if is_output(function, name)]
    for output, other in itertools.product(outputs, tensors):
        if output != other and not (other in outputs and tensors.index(other) < tensors.index(output)):
            for how in OVERLAPS:
                yield {"kind": target, "arguments": [output, other], "change": f"{OVERLAP} {how}"}
    for output in outputs:
        yield {"kind": target, "arguments": [output], "change": ROWS}
    for name, lie in itertools.product(tensors, LIES):
        if "parameter" not in lie or leaves[name].dtype.is_floating_point:
            yield {"kind": target, "arguments": [name], "change": lie}
    for sizes in too_large(symbols(function, leaves)):
        if resized(function, leaves, sizes) is not None:
            yield {"kind": target, "arguments": [], "change": SIZES, "sizes": sizes}


def owns(case: Case) -> bool:
    """Whether a case of `tests.attack.misuse` is one of these."""
    change = case["change"]
    return change in (ROWS, SIZES, *LIES) or change.startswith(OVERLAP)


def check(case: Case, one: Recorded) -> list[str]:
    """Make the call of a case: what it must not do and does."""
    function, change, names = function_of(case["kind"]), case["change"], case["arguments"]
    honest = {name: guarded(value) for name, value in leaves_of(one).items() if isinstance(value, Tensor)}
    changed: dict[str, Any] = dict(honest)
    if change == SIZES:
        changed |= resized(function, leaves_of(one), case["sizes"]) or {}
    elif change == ROWS:
        rows = honest[names[0]]
        changed[names[0]] = rows[:1].clone().expand_as(rows)
    elif change in LIES:
        changed[names[0]] = LIES[change](honest[names[0]])
    else:
        changed |= dict(zip(names, _overlapping(*(honest[name] for name in names), change), strict=True))
    try:
        _call(one, changed)
    except Exception as error:
        return [f"raises a bare {type(error).__name__}"] if isinstance(error, SystemError) else []
    if change == SIZES:
        return []
    if change == ROWS or change.startswith(OVERLAP):
        return ["is accepted"]
    if is_output(function, names[0]) and change in LOSES_OUTPUT:
        return []
    right = {name: guarded(value) for name, value in leaves_of(one).items() if isinstance(value, Tensor)}
    _call(one, right)
    outputs = [name for name in honest if is_output(function, name)]
    equal = all(torch.equal(_bits(honest[name]), _bits(right[name])) for name in outputs)
    return [] if equal else ["is accepted and gives another result"]


def function_of(target: str) -> str:
    """The name of the function of a target."""
    return target.split()[0].removeprefix("_native.")


def _call(one: Recorded, tensors: Mapping[str, Any]) -> None:
    for name, value in tensors.items():
        one = with_leaf(one, name, value)
    rebuild(one, lambda value: value)


def _overlapping(output: Tensor, other: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """Two tensors of the same shapes and dtypes in one memory, with the numbers of the second."""
    shift = 1 if "second" in how else 0
    sizes = [x.numel() * x.element_size() for x in (output, other)]
    start = shift * max(output.element_size(), other.element_size())
    memory = torch.zeros(max(start + sizes[0], sizes[1]) + 8, dtype=torch.uint8)
    shared = [
        memory[begin : begin + size].view(x.dtype).view(x.shape)
        for begin, size, x in zip((start, 0), sizes, (output, other), strict=True)
    ]
    shared[1].copy_(other)
    return shared[0], shared[1]


def _bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)
