"""Calls that are recorded, changed in one place and made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Recorded:
    """A call of a function or class; arguments may be calls themselves."""

    function: Callable[..., Any]
    arguments: tuple[tuple[str, Any], ...]
    n_positional: int


def rebuild(value: Any, fresh: Callable[[Any], Any]) -> Any:
    """Make a recorded call, innermost first, with copies of its tensors."""
    if isinstance(value, list):
        return [rebuild(one, fresh) for one in value]
    if not isinstance(value, Recorded):
        return fresh(value)
    values = [rebuild(one, fresh) for _, one in value.arguments]
    names = [name for name, _ in value.arguments]
    return value.function(
        *values[: value.n_positional], **dict(list(zip(names, values, strict=True))[value.n_positional :])
    )


def leaves_of(value: Any, path: str = "") -> dict[str, Any]:
    """Arguments that are no calls, by a path such as ``params.q.row_stride``."""
    found = {}
    for name, one in _parts(value):
        inner = f"{path}.{name}" if path else name
        found |= leaves_of(one, inner) if isinstance(one, Recorded | list) else {inner: one}
    return found


def with_leaf(value: Any, path: str, leaf: Any) -> Any:
    """The same call with another argument at a path."""
    first, _, rest = path.partition(".")
    parts = [
        (name, (with_leaf(one, rest, leaf) if rest else leaf) if name == first else one) for name, one in _parts(value)
    ]
    return [one for _, one in parts] if isinstance(value, list) else replace(value, arguments=tuple(parts))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    yield from ((str(i), one) for i, one in enumerate(value)) if isinstance(value, list) else value.arguments


def recorded_operator_calls(program: Callable[[], None]) -> dict[str, Recorded]:
    """The first call of each operator ``torch.ops.smyrf.*`` in a program, for each number of tensors that it takes."""
    found: dict[str, Recorded] = {}

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name
            if name.startswith("smyrf::"):
                names = [one.name for one in func._schema.arguments]
                values = [list(one) if isinstance(one, list | tuple) else one for one in args]
                values = [[_kept(x) for x in one] if isinstance(one, list) else _kept(one) for one in values]
                key = f"{name} {sum(len(one) for one in values if isinstance(one, list))}"
                found.setdefault(key, Recorded(func, tuple(zip(names, values, strict=False)), len(values)))
            return func(*args, **(kwargs or {}))

    with Record():
        program()
    return found


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
