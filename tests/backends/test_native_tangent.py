"""Tangent attention in one operator, as PyTorch sees it."""

import pytest
import torch

from problems import SEED, clustered_problem
from smyrf.backends import BACKENDS, backends
from smyrf.methods import Tangent

if "native" not in BACKENDS:  # where the package was installed without a compiler
    pytest.skip(backends()["native"], allow_module_level=True)
from smyrf.backends.native.tangent import _attend_tangent, _attend_tangent_backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_attend_tangent_obeys_pytorchs_rules(dtype, dropout_p):
    q, k, v = (x.requires_grad_() for x in clustered_problem(64, 70, batch=1, dtype=dtype))
    mask = torch.rand(1, 70) < 0.8
    sizes = [size for level in Tangent(20, levels=2).sizes(70, 64) for size in level]
    options = (mask, 0.3, 8, sizes, dropout_p, SEED if dropout_p else None)
    torch.library.opcheck(_attend_tangent, (q, k, v, *options))
    out, lse, *saved = (x.detach() for x in _attend_tangent(q, k, v, *options))
    inputs = (torch.randn_like(out), out, lse, saved, q.detach(), k.detach(), v.detach(), *options)
    torch.library.opcheck(_attend_tangent_backward, inputs)
