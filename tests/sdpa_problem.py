"""The calls that tests of `intercept_sdpa` make: their size, method and padding, and why one was dense."""

import torch

from smyrf import Tangent

N = 300
METHOD = Tangent(48)
HIDDEN = torch.arange(N).expand(2, -1) >= torch.tensor([[230], [N]])  # padding of two rows


def problem(n=N, m=N, heads=2, kv_heads=2, d=8, e=8):
    return torch.randn(2, heads, n, d), torch.randn(2, kv_heads, m, d), torch.randn(2, kv_heads, m, e)


def reason(calls):
    """Why the only call was dense."""
    assert calls.served == 0 and calls.total == 1
    return next(iter(calls.dense))
