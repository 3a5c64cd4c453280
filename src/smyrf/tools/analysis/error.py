"""Error of a method's output against dense attention, on given q, k and v."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smyrf.call import Call
from smyrf.methods import Dense, Method
from smyrf.models.calls import serve


def relative_error(output: Tensor, exact: Tensor) -> float:
    """‖output − exact‖ / ‖exact‖ in the Frobenius norm.

    Example:
        >>> import torch
        >>> relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0]))
        0.17149...
    """
    output, exact = output.double(), exact.double()
    return float((output - exact).norm() / exact.norm())


def output_errors(calls: Sequence[Call], method: Method, seed: int = 0) -> list[float]:
    """Relative output error of a method on each captured attention call.

    Example:
        >>> import torch
        >>> from smyrf import Smyrf
        >>> x = torch.randn(1, 2, 64, 8)
        >>> max(output_errors([Call(x, x, x, 0.5)], Smyrf(cluster_size=64))) < 1e-6
        True
    """
    errors = []
    with torch.no_grad():
        for call in calls:
            errors.append(relative_error(serve(call, method, generator=seed), serve(call, Dense())))
    return errors
