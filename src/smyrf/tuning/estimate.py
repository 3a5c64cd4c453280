"""The error of a method on a call, estimated from a sample of rows that are computed exactly.

Shapes: heads, N queries, M keys, E value width, R rows in the sample.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from smyrf.call import Call
from smyrf.methods import Method
from smyrf.models.calls import serve


class Sample:
    """A sample of rows of one document, with their exact outputs.

    A method has to run on all queries, because they decide the clusters, but dense attention only on the
    sample. Padding is not sampled: its outputs are not read.

    Args:
        call: with a batch of one.
        rows: R, the size of the sample.
        seed: of the sample, and of the clusters of a random method.
        backend: for the method; None for the best.

    Example:
        >>> import torch, smyrf
        >>> x = torch.randn(1, 2, 300, 16)
        >>> sample = Sample(Call(x, x, x, 0.25), rows=64, seed=0)
        >>> sample.error(smyrf.Tangent(0.5)) < sample.error(smyrf.Tangent(0.25))
        True
    """

    def __init__(self, call: Call, rows: int, seed: int, backend: str | None = None) -> None:
        self.call = call = replace(call, q=call.q.detach(), k=call.k.detach(), v=call.v.detach())
        self.seed = seed
        self.backend = backend
        device, n_keys = call.q.device, call.n_keys
        self.rows = call.sample_rows(rows, seed).to(device)  # (R,)

        mask = None if call.key_mask is None else call.key_mask[:, None, None]  # (1, 1, 1, M)
        if call.is_causal:
            before = torch.arange(n_keys, device=device) <= self.rows[:, None]  # (R, M)
            mask = before[None, None] if mask is None else mask & before
        q, k, v = (x.float() for x in (call.q.index_select(2, self.rows), call.k, call.v))
        gqa = q.shape[1] != k.shape[1]
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            self.exact = F.scaled_dot_product_attention(q, k, v, mask, scale=call.scale, enable_gqa=gqa)
        self.squares = self.exact.double().square().sum((0, 2, 3)).cpu()  # (heads,)

    def square_errors(self, method: Method) -> Tensor:
        """‖output − exact‖² of each head over the sample: ``(heads,)``."""
        with torch.no_grad():
            out = serve(self.call, method, generator=self.seed, backend=self.backend)
        difference = out.index_select(2, self.rows).double() - self.exact.double()  # (1, heads, R, E)
        return difference.square().sum((0, 2, 3)).cpu()

    def error(self, method: Method) -> float:
        """‖output − exact‖ / ‖exact‖ over the sample."""
        return relative(self.square_errors(method), self.squares)


def relative(square_errors: Tensor, squares: Tensor) -> float:
    """Relative error over all heads, from sums of squares by head.

    Example:
        >>> round(relative(torch.tensor([1.0, 3.0]), torch.tensor([300.0, 100.0])), 6)
        0.1
    """
    return float((square_errors.sum() / squares.sum().clamp(min=1e-300)).sqrt())
