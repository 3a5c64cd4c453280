"""What a case of the attack has shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

# Parameters of a case, as JSON: "kind" groups it in the results, and the rest repeats it.
Case: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The result of one case.

    Args:
        failures: broken promises, one sentence each.
        count: how many attempts the case stands for, such as kills.
        tally: how often each kind of comparison was made, or left out and why.
    """

    failures: tuple[str, ...] = ()
    count: int = 1
    tally: dict[str, int] = field(default_factory=dict)
