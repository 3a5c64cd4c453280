"""Causal attention by recursive halving."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from problems import FAST, backends, fast, make_groups
from smyrf import Dense, Smyrf, Tangent, attention
from smyrf.backends import BACKENDS
from smyrf.methods import BASE_LENGTH


def causal_groups(q, k, method, backend=FAST[-1]):
    return make_groups(q, k, k, method, backend, scale=1.0, is_causal=True)


@settings(max_examples=15)
@given(n=st.integers(1, 700), m=st.integers(1, 700))
def test_with_exact_parts_every_allowed_pair_meets_once(n, m):
    q, k = torch.randn(1, 1, n, 2), torch.randn(1, 1, m, 2)
    groups = causal_groups(q, k, Dense())
    met = torch.zeros(n, m)
    for g in groups:
        for queries, keys in zip(g.queries[0], g.keys[0], strict=True):
            pair = torch.ones(len(queries), len(keys))
            pair = pair.tril() if g.causal else pair
            pair = pair * (queries >= 0)[:, None] * (keys >= 0)
            met.index_put_((queries.clamp(min=0)[:, None], keys.clamp(min=0)), pair, accumulate=True)
    assert torch.equal(met, torch.ones(n, m).tril())


@pytest.mark.parametrize(("n", "m"), [(1024, 1024), (2048, 2048), (1500, 700), (300, 300)])
def test_key_visits_are_those_that_are_made(n, m):
    """Counted in the lists themselves, for SMYRF, which has no costs besides."""
    q, k = torch.randn(1, 1, n, 4), torch.randn(1, 1, m, 4)
    method = Smyrf(3, 32)
    met = 0
    for g in causal_groups(q, k, method):
        filled = (g.queries >= 0).sum(-1), (g.keys >= 0).sum(-1)
        pairs = filled[0] * filled[1]
        met += int((filled[0] * (filled[0] + 1) // 2 if g.causal else pairs).sum())
    assert 0.97 < method.plan(n, m, is_causal=True).key_visits / (met / n) < 1.1


@fast
@pytest.mark.parametrize("n_levels", [1, 2])
def test_tangent_never_sees_later_keys_and_values(backend, n_levels):
    q, k, v = torch.randn(3, 1, 2, 900, 6).unbind()
    method = Tangent(40, levels=n_levels)
    base = attention(q, k, v, method=method, is_causal=True, backend=backend)
    for i in (0, 255, 449, 450, 600, 898):
        k2, v2 = k.clone(), v.clone()
        k2[:, :, i + 1 :], v2[:, :, i + 1 :] = 7 * torch.randn(2, 899 - i, 6), 1e4
        other = attention(q, k2, v2, method=method, is_causal=True, backend=backend)
        torch.testing.assert_close(base[:, :, : i + 1], other[:, :, : i + 1], atol=1e-6, rtol=1e-6)


@backends
@pytest.mark.parametrize("method", [Smyrf(3, 32), Tangent(60, levels=2)])
def test_lists_hold_no_later_key(backend, method):
    q = torch.randn(1, 2, 777, 4)
    groups = causal_groups(q, q, method, backend)
    for g in groups:
        if g.causal:
            assert torch.equal(g.queries, g.keys)
            continue
        last_key = g.keys.amax(-1)
        first_query = g.queries.masked_fill(g.queries < 0, 10**9).amin(-1)
        assert (last_key < first_query).all()


@backends
def test_later_keys_and_values_never_reach_an_output(backend):
    q, k, v = torch.randn(3, 1, 2, 900, 6).unbind()
    method = Smyrf(2, 32)
    base = attention(q, k, v, method=method, is_causal=True, generator=0, backend=backend)
    for i in (0, 100, 255, 449, 450, 600, 898):
        k2, v2 = k.clone(), v.clone()
        k2[:, :, i + 1 :], v2[:, :, i + 1 :] = 7 * torch.randn(2, 899 - i, 6), 1e4
        other = attention(q, k2, v2, method=method, is_causal=True, generator=0, backend=backend)
        torch.testing.assert_close(base[:, :, : i + 1], other[:, :, : i + 1], atol=1e-6, rtol=1e-6)


@fast
def test_every_query_sees_itself(backend):
    """With values that name their position and keys that match only themselves, each query finds its own."""
    n = 700
    x = 30 * torch.nn.functional.normalize(torch.randn(1, 1, n, 16), dim=-1)
    v = torch.arange(float(n)).view(1, 1, n, 1)
    out = attention(x, x, v, method=Smyrf(1, 32), is_causal=True, scale=1.0, generator=0, backend=backend)
    torch.testing.assert_close(out, v, atol=1e-2, rtol=0)


@pytest.mark.parametrize("n", [1, 2, BASE_LENGTH - 1, BASE_LENGTH, BASE_LENGTH + 1, 611])
@pytest.mark.parametrize("masked", [False, True])
def test_one_cluster_is_exact(n, masked):
    q, k, v = torch.randn(3, 2, 2, n, 5, dtype=torch.float64).unbind()
    mask = torch.rand(2, n) > 0.5 if masked else None
    sees = torch.ones(n, n, dtype=torch.bool).tril()
    if masked:
        sees = sees & mask[:, None, None]
    expected = oracle.dense(q, k, v, 5**-0.5, sees)
    for method in (Smyrf(3, n), Dense()):
        for backend in (None, *BACKENDS):
            out = attention(q, k, v, method=method, key_mask=mask, is_causal=True, backend=backend)
            torch.testing.assert_close(out, expected)


@fast
def test_left_padding_gives_zeros_where_nothing_is_visible(backend):
    q, k, v = torch.randn(3, 2, 2, 600, 5).unbind()
    mask = torch.arange(600) >= torch.tensor([[0], [300]])
    out = attention(q, k, v, method=Smyrf(2, 16), key_mask=mask, is_causal=True, backend=backend)
    assert (out[1, :, :300] == 0).all()
    assert (out[1, :, 300:] != 0).all()
    assert out.isfinite().all()


def test_error_is_moderate_on_structured_data():
    q = torch.randn(1, 2, 1024, 16).cumsum(2) / 8
    k = q + 0.1 * torch.randn_like(q)
    v = torch.randn(1, 2, 1024, 16)
    exact = attention(q, k, v, method=Dense(), is_causal=True)
    out = attention(q, k, v, method=Smyrf(8, 64, deduplicate=True), is_causal=True, generator=0)
    assert (out - exact).norm() / exact.norm() < 0.1


@pytest.mark.parametrize("masked", [False, True])
def test_short_causal_calls_are_pytorchs_own(monkeypatch, masked):
    """One block of the diagonal is dense attention, and lists of groups would only take longer."""
    q, k, v = torch.randn(3, 2, 4, 77, 8).unbind()
    mask = torch.arange(77) >= torch.tensor([0, 30])[:, None] if masked else None
    expected = torch.ones(77, 77, dtype=torch.bool).tril()
    expected = expected if mask is None else expected & mask[:, None, None]
    monkeypatch.setattr(sys.modules["smyrf.attention"], "group", None)  # not to be called
    out = attention(q, k, v, method=Tangent(0.25), key_mask=mask, is_causal=True)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, expected)
    torch.testing.assert_close(out, dense)
