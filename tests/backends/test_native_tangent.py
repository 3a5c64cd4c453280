"""Tangent attention in one operator: as PyTorch sees it, and against its stages."""

import pytest
import torch

from problems import SEED, clustered_problem
from smyrf.backends import BACKENDS, backends
from smyrf.call import Call
from smyrf.grouping.group import group
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


@pytest.mark.parametrize("n_levels", [1, 2])
@pytest.mark.parametrize("options", [{}, {"masked": True}, {"dropout_p": 0.3}], ids=["plain", "masked", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_stages_at_once_give_what_they_give_one_after_the_other(n_levels, options, dtype):
    run, method = BACKENDS["native"], Tangent(60, levels=n_levels)
    q, k, v = clustered_problem(300, 290, 8, 12, 2, 4, 2, dtype)
    mask = torch.rand(2, 290) < 0.8 if options.get("masked") else None
    leaves = [x.requires_grad_() for x in (q, k, v)]
    call = Call(q, k, v, 0.3, mask, False, options.get("dropout_p", 0.0), dropout_seed=SEED)
    prepared, layout = run.prepare(call), call.plan(method)
    whole = run.attend_tangent(prepared, method, layout).to(dtype)
    one_by_one = run.attend(prepared, group(prepared, method, run, layout))[0].to(dtype)
    assert torch.equal(whole, one_by_one)
    weight = torch.randn_like(whole)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}  # rounded once, not twice
    for ours, theirs in zip(*(torch.autograd.grad(out, leaves, weight) for out in (whole, one_by_one)), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
