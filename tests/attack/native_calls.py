"""Valid calls of the functions and classes of `smyrf._native`, recorded while the package makes them.

This is the only file of the attack that knows the extension. Whatever its functions take, structs or tensors, is
recorded as it is passed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.attack.recorded_calls import Recorded, leaves_of


def recorded_native_calls(program: Callable[[], None]) -> dict[str, Recorded]:
    """The first call of each function and class of the extension in a program, for each set of tensors that it takes.

    There is none without the extension. A function that the program never calls is an error: it would not be attacked.
    """
    native: Any = sys.modules.get("smyrf._native")
    if native is None:
        return {}
    found: dict[str, Recorded] = {}
    made: list[tuple[Any, Recorded]] = []  # keeps what was made alive, so that identities stay unique
    originals = {name: getattr(native, name) for name in dir(native) if not name.startswith("_")}
    originals = {name: value for name, value in originals.items() if callable(value)}

    def inner(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [inner(one) for one in value]
        for result, call in reversed(made):
            if result is value:
                return call
        return value.detach().clone() if isinstance(value, Tensor) else value

    def recorder(name: str, original: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            arguments = [(str(i), one) for i, one in enumerate(args)] + list(kwargs.items())
            call = Recorded(original, tuple((key, inner(one)) for key, one in arguments), len(args))
            result = original(*args, **kwargs)
            if isinstance(original, type):
                made.append((result, call))
                del made[:-200]
            tensors = [path for path, value in leaves_of(call).items() if isinstance(value, Tensor)]
            optional = [part for part in ("multiplicity", "far") if any(part in path.split(".") for path in tensors)]
            found.setdefault(" ".join([f"_native.{name}", str(len(tensors)), *optional]), call)
            return result

        return record

    try:
        for name, original in originals.items():
            setattr(native, name, recorder(name, original))
        program()
    finally:
        for name, original in originals.items():
            setattr(native, name, original)
    missing = set(originals) - {name.split()[0].removeprefix("_native.") for name in found}
    if missing:
        raise RuntimeError(f"no call of {', '.join(sorted(missing))} of the extension was recorded")
    return found
