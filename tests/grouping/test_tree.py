"""The joint tree of queries and keys, on every backend."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from problems import backends, fast, make_call
from smyrf import Dense, Tangent, attention
from smyrf.backends import find_backend


def tree_of(q, k, mask, n_leaves, rank, backend):
    """Queries ``(R, L·C)``, copies, keys and their leaves ``(R, M)`` of q ``(R, N, D)`` and k ``(R, M, D)``."""
    run = find_backend(backend)
    call = run.prepare(make_call(q[:, None], k[:, None], key_mask=mask))
    queries, is_copy, keys, leaves = run.build_tree(call, n_leaves, rank)
    return queries.flatten(1), is_copy.flatten(1), keys, leaves


@backends
@given(n=st.integers(1, 200), m=st.integers(1, 200), depth=st.integers(0, 6), is_masked=st.booleans())
def test_every_query_and_key_has_one_place_in_the_tree(backend, n, m, depth, is_masked):
    q, k = torch.randn(2, n, 6), torch.randn(2, m, 6)
    mask = torch.rand(2, m) < 0.5 if is_masked else None
    queries, copies, keys, leaves = tree_of(q, k, mask, 2**depth, 4, backend)
    for row in range(2):
        assert sorted(queries[row][~copies[row]].tolist()) == list(range(n))
        assert sorted(keys[row].tolist()) == list(range(m))
    size = -(-m // 2**depth)
    assert (leaves.diff(dim=1) >= 0).all()
    assert all(leaves[0].eq(leaf).sum() <= size for leaf in range(2**depth))


@backends
def test_the_tree_puts_together_what_weighs_keys_alike(backend):
    """Queries of eight distant kinds end up in eight leaves, each with the keys of its kind."""
    centres = 10 * torch.randn(8, 16)
    kind = torch.arange(256) % 8
    q = centres[kind] + 0.1 * torch.randn(1, 256, 16)
    k = centres[kind.flip(0)] + 0.1 * torch.randn(1, 256, 16)
    queries, _, keys, _ = tree_of(q, k, None, 8, 8, backend)
    of_queries, of_keys = kind[queries[0]].view(8, 32), kind.flip(0)[keys[0]].view(8, 32)
    assert torch.equal(of_queries, of_queries[:, :1].expand(8, 32))
    assert torch.equal(of_keys, of_queries)


@backends
def test_masked_keys_are_spread_over_all_branches(backend):
    q, k = torch.randn(1, 512, 8), torch.randn(1, 512, 8)
    mask = (torch.arange(512) < 64)[None]
    _, _, keys, leaves = tree_of(q, k, mask, 8, 8, backend)
    valid = mask[0][keys[0]]
    counts = torch.stack([valid[leaves[0] == leaf].sum() for leaf in range(8)])
    assert counts.min() >= 4  # 8 each, if the split were perfect


@backends
@pytest.mark.parametrize(
    "values", [torch.zeros(1, 64, 4), torch.full((1, 64, 4), 3e37), torch.eye(4).repeat(16, 1)[None]]
)
def test_degenerate_vectors_have_a_tree_too(backend, values):
    queries, _, keys, _ = tree_of(values, values, None, 8, 4, backend)
    assert sorted(queries[0].tolist()) == sorted(keys[0].tolist()) == list(range(64))


@fast
@pytest.mark.parametrize("n_different", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("d", [16, 64, 128])
def test_few_different_keys_are_no_problem(backend, n_different, d):
    """As in a blank image, or with padding that is not masked: covariances without full rank."""
    q, k, v = torch.randn(3, 1, 2, 512, d).unbind()
    k[:, 0, n_different:] = k[:, 0, :1]  # the other head is as it was
    out = attention(q, k, v, method=Tangent(64), backend=backend)
    assert out.isfinite().all()
    assert torch.equal(out[:, 1:], attention(q[:, 1:], k[:, 1:], v[:, 1:], method=Tangent(64), backend=backend))


@backends
@pytest.mark.parametrize("n_queries", [1, 2, 3, 5])
def test_fewer_queries_than_directions_are_no_problem(backend, n_queries):
    """The covariance of the queries has a low rank; rounding must not make a Gram matrix indefinite."""
    for d in range(8, 17):
        q, k = torch.randn(6, n_queries, d), 100 * torch.randn(6, 819, d)
        _, _, keys, _ = tree_of(q, k, None, 2, 12, backend)
        assert torch.equal(keys.sort(1).values, torch.arange(819).int().expand(6, -1))


@fast
@pytest.mark.parametrize("factor", [5e4, 1e10, 1e20])
def test_one_huge_key_is_no_problem(backend, factor):
    q, k, v = torch.randn(3, 1, 2, 512, 32).unbind()
    k[:, :, 7] *= factor
    assert attention(q, k, v, method=Tangent(64), backend=backend).isfinite().all()


@fast
@pytest.mark.parametrize("which", range(3))
def test_masked_keys_take_no_place_however_large_the_numbers(backend, which):
    """Squares overflow, but 30 valid keys fit into 64 places: the result is exact."""
    inputs = list(torch.randn(3, 1, 2, 512, 16).unbind())
    inputs[which] = inputs[which] * 1e20
    mask = (torch.arange(512) < 30)[None]
    out, exact = (
        attention(*inputs, method=method, key_mask=mask, backend=backend) for method in (Tangent(128), Dense())
    )
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
