"""`PerHead`: a method for each head."""

import pytest
import torch

from problems import default_too
from smyrf import Dense, PerHead, Smyrf, Tangent, attention

METHODS = (Tangent(48), Smyrf(2, 16), Dense(), Tangent(48), Tangent(64), Dense())


def inputs(kv_heads=6):
    q = torch.randn(2, 6, 131, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, kv_heads, 113, 8, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, kv_heads, 113, 5, dtype=torch.float64, requires_grad=True)
    return q, k, v


@default_too
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_each_head_is_what_its_method_gives_alone(backend, kv_heads, masked):
    q, k, v = inputs(kv_heads)
    mask = torch.rand(2, 113) < 0.8 if masked else None
    options = {"key_mask": mask, "scale": 0.7, "generator": 5, "backend": backend}
    out = attention(q, k, v, method=PerHead(METHODS), enable_gqa=True, **options)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    parts = []
    for head, method in enumerate(METHODS):
        at = head * kv_heads // 6
        one = [x[:, i : i + 1] for x, i in ((q, head), (k, at), (v, at))]
        parts.append(attention(*one, method=method, **options))
    alone = torch.cat(parts, dim=1)
    torch.testing.assert_close(out, alone)
    torch.testing.assert_close(gradients, torch.autograd.grad(alone.square().sum(), (q, k, v)))


@default_too
def test_equal_methods_are_that_method(backend):
    q, k, v = inputs()
    for options in ({}, {"is_causal": True}, {"dropout_p": 0.3}):
        ours, theirs = (
            attention(q, k, v, method=method, generator=1, backend=backend, **options)
            for method in (PerHead((Tangent(40),) * 6), Tangent(40))
        )
        assert torch.equal(ours, theirs)


def test_a_wrong_number_of_heads_is_named():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="2 methods for the 6 heads"):
        attention(q, k, v, method=PerHead((Dense(), Dense())))


@default_too
def test_groups_of_heads_drop_different_places(backend):
    q = k = torch.zeros(1, 2, 64, 4)
    v = torch.eye(64).expand(1, 2, 64, 64)
    method = PerHead((Smyrf(1, 64), Smyrf(2, 64)))  # both dense, in groups of their own
    dropped = attention(q, k, v, method=method, dropout_p=0.5, generator=3, backend=backend) == 0
    assert not torch.equal(dropped[0, 0], dropped[0, 1])
