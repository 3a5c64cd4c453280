"""A problem of prime sizes for `smyrf.attention`, and the methods and kernels that it is given to."""

import pytest
import torch

from smyrf import Tangent
from smyrf.backends import BACKENDS

# One level and two: small budgets for problems of about a hundred keys, so that neither is dense.
TANGENTS = (Tangent(30, levels=1), Tangent(25, levels=2))

backends = pytest.mark.parametrize("backend", [None, *BACKENDS])
# Kernels that are made for use, whichever of them is the default.
fast = pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])


def problem(n=97, m=113, d=13, e=17, batch=2, heads=3, kv_heads=3, dtype=torch.float32):
    q = torch.randn(batch, heads, n, d, dtype=dtype)
    k = torch.randn(batch, kv_heads, m, d, dtype=dtype)
    v = torch.randn(batch, kv_heads, m, e, dtype=dtype)
    return q, k, v
