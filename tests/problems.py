"""Problems of prime sizes, the methods and backends that they are given to, and calls made of them."""

import pytest
import torch

from smyrf import Tangent
from smyrf.backends import BACKENDS, find_backend
from smyrf.backends import attend as attend_call
from smyrf.call import Call
from smyrf.grouping.group import group

SEED = torch.tensor(11)
# One level and two: small budgets for problems of about a hundred keys, so that neither is dense.
TANGENTS = (Tangent(30, levels=1), Tangent(25, levels=2))

FAST = [name for name in BACKENDS if name != "reference"]
backends = pytest.mark.parametrize("backend", BACKENDS)
default_too = pytest.mark.parametrize("backend", [None, *BACKENDS])
fast = pytest.mark.parametrize("backend", FAST)


def problem(n=97, m=113, d=13, e=17, batch=2, heads=3, kv_heads=3, dtype=torch.float32):
    """q, k and v of independent normal numbers."""
    q = torch.randn(batch, heads, n, d, dtype=dtype)
    k = torch.randn(batch, kv_heads, m, d, dtype=dtype)
    v = torch.randn(batch, kv_heads, m, e, dtype=dtype)
    return q, k, v


def clustered_problem(n=211, m=307, d=13, e=17, batch=2, heads=4, kv_heads=2, dtype=torch.float64):
    """q and k around a few centres, so that there is something to cluster."""
    centres = torch.randn(6, d, dtype=dtype)
    q = centres[torch.randint(6, (batch, heads, n))] + 0.5 * torch.randn(batch, heads, n, d, dtype=dtype)
    k = centres[torch.randint(6, (batch, kv_heads, m))] + 0.5 * torch.randn(batch, kv_heads, m, d, dtype=dtype)
    return q, k, torch.randn(batch, kv_heads, m, e, dtype=dtype)


def make_call(q, k, v=None, scale=0.3, seed=SEED, **options):
    """The record of a call."""
    return Call(q, k, k if v is None else v, scale, seed=seed, **options)


def make_groups(q, k, v, method, backend="torch", **options):
    """Lists of groups by the stages of one backend."""
    run = find_backend(backend)
    return group(run.prepare(make_call(q, k, v, **options)), method, run)


def attend(q, k, v, groups, backend=None, *, scale=None, dropout_p=0.0, seed=None):
    """Output and log-sum-exp over given groups."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = Call(q, k, v, scale, dropout_p=dropout_p, dropout_seed=seed)
    return attend_call(call, groups, backend)


def output_and_gradients(function, *tensors):
    """The output of a function of tensors, and the gradients of a weighted sum of it."""
    inputs = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*inputs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


def assert_close(found, expected, **tolerances):
    """All tensors of two sequences are close."""
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerances)


STRIDES = ("heads inside", "slice of a wider tensor", "width outside", "every other row", "batch inside")


def strided(x, how):
    """The same values with other strides, NaN between them."""
    if how == "heads inside":  # what a model's (batch, N, heads, D) gives
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "slice of a wider tensor":  # the first number is not aligned
        return torch.nn.functional.pad(x, (1, 2), value=torch.nan)[..., 1:-2]
    if how == "width outside":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "every other row":
        return torch.stack([x, torch.full_like(x, torch.nan)], 3).flatten(2, 3)[:, :, ::2]
    if how == "batch inside":
        return x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    return x
