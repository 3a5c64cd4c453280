"""What all methods promise on all kernels: exact where they are, weights that sum to one, rows and masks kept apart."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import oracle
from problems import TANGENTS, default_too, fast, problem
from smyrf import Dense, Smyrf, Tangent, attention, methods
from smyrf.backends import BACKENDS

# --- exact mode ---------------------------------------------------------------------------------------


@default_too
@pytest.mark.parametrize("n_hashes", [1, 3, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_one_cluster_is_dense_for_any_number_of_rounds(backend, n_hashes, masked):
    q, k, v = problem()
    mask = torch.rand(2, 113) > 0.5 if masked else None
    out = attention(q, k, v, method=Smyrf(n_hashes, 97), key_mask=mask, backend=backend)
    whole = None if mask is None else mask[:, None, None].expand(-1, 3, 97, -1)
    torch.testing.assert_close(out.double(), oracle.dense(q, k, v, 13**-0.5, whole), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("width", "value_width"), [(4, 16), (24, 8), (8, 8)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dense_with_values_of_any_width_and_order_never_forms_the_map(width, value_width, is_causal):
    q, k = torch.randn(2, 4, 90, width), torch.randn(2, 2, 70, width)
    v = torch.randn(2, 2, value_width, 70).transpose(2, 3)  # as an image's channels lie
    mask = torch.rand(2, 70) < 0.7
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    options = {"method": Dense(), "is_causal": is_causal, "enable_gqa": True, "key_mask": None if is_causal else mask}
    with torch.profiler.profile() as profile:
        out = attention(q, k, v, **options)
    assert any("flash_attention" in event.key for event in profile.key_averages())
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    bias = None if is_causal else torch.where(mask, 0.0, -torch.inf)[:, None, None].double()
    expected = F.scaled_dot_product_attention(*exact, attn_mask=bias, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
    seen = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), seen)
    for one, other in zip(found, torch.autograd.grad(expected, exact, seen.double()), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-3)
    if width != value_width:  # PyTorch's own kernel has no forward mode where they are equal
        _, moved = torch.func.jvp(lambda q: attention(q, k, v, **options), (q,), (torch.ones_like(q),))
        assert moved.shape == out.shape


def test_dense_is_pytorchs_own_function_to_the_bit():
    q, k, _ = problem()
    v = torch.randn_like(k)  # of another width it is to rounding
    assert torch.equal(attention(q, k, v, method=Dense()), F.scaled_dot_product_attention(q, k, v))
    same = attention(q, k[:, :, :97], v[:, :, :97], method=Dense(), is_causal=True, scale=0.5)
    assert torch.equal(same, F.scaled_dot_product_attention(q, k[:, :, :97], v[:, :, :97], is_causal=True, scale=0.5))


def test_permuting_keys_and_values_together_changes_nothing_in_exact_mode():
    q, k, v = problem()
    order = torch.randperm(113)
    for backend in BACKENDS:
        a = attention(q, k, v, method=Smyrf(2, 97), backend=backend)
        b = attention(q, k[:, :, order], v[:, :, order], method=Smyrf(2, 97), backend=backend)
        torch.testing.assert_close(a, b)


# --- what always holds --------------------------------------------------------------------------------


@fast
@given(
    n=st.integers(1, 70),
    m=st.integers(1, 70),
    d=st.integers(1, 9),
    e=st.integers(1, 9),
    size=st.integers(1, 40),
    n_hashes=st.integers(1, 4),
    deduplicate=st.booleans(),
    transform=st.sampled_from(methods.TRANSFORMS),
    hashing=st.sampled_from(methods.HASHINGS),
    is_causal=st.booleans(),
    share=st.sampled_from([None, 0.0, 0.3, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_constant_values_give_constant_output(
    backend, n, m, d, e, size, n_hashes, deduplicate, transform, hashing, is_causal, share, dtype, seed
):
    """Weights are non-negative and sum to one, or the query sees nothing: any shape, mask and dtype."""
    torch.manual_seed(seed)
    q, k, _ = problem(n, m, d, e, heads=2, kv_heads=1, dtype=dtype)
    v = torch.ones(2, 1, m, e, dtype=dtype)
    mask = None if share is None else torch.rand(2, m) < share
    method = Smyrf(n_hashes, size, transform, hashing, deduplicate)
    out = attention(
        q, k, v, method=method, key_mask=mask, is_causal=is_causal, enable_gqa=True, generator=seed, backend=backend
    )
    assert out.shape == (2, 2, n, e)
    assert out.dtype == dtype
    visible = torch.ones(2, m, dtype=torch.bool) if mask is None else mask
    sees = visible[:, None].expand(-1, n, -1)
    if is_causal:
        sees = sees & torch.ones(n, m, dtype=torch.bool).tril()
    expected = sees.any(-1)[:, None, :, None].expand_as(out).to(dtype)
    torch.testing.assert_close(out, expected, atol=0.02 if dtype in (torch.float16, torch.bfloat16) else 1e-5, rtol=0)


@default_too
@pytest.mark.parametrize("factor", [30.0, 300.0, 3000.0])
@pytest.mark.parametrize("method", [Smyrf(4, 16), Smyrf(1, 16), Smyrf(2, 100), *TANGENTS])
def test_weights_sum_to_one_however_large_the_scores_are(backend, factor, method):
    q, k = factor * torch.randn(2, 1, 2, 97, 13)
    v = torch.ones(1, 2, 97, 3)
    out = attention(q, k, v, method=method, scale=1.0, backend=backend)
    torch.testing.assert_close(out, torch.ones_like(out), atol=1e-6, rtol=0)
    half = attention(q.half(), k.half(), 60000 * v.half(), method=method, scale=1.0, backend=backend)
    assert half.isfinite().all()


@default_too
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("method", [Smyrf(3, 16), *TANGENTS])
def test_a_batch_equals_its_rows_run_alone(backend, is_causal, method):
    q, k, v = problem(batch=3)
    mask = torch.rand(3, 113) > 0.4
    whole = attention(q, k, v, method=method, key_mask=mask, is_causal=is_causal, generator=5, backend=backend)
    for i in range(3):
        row = slice(i, i + 1)
        alone = attention(
            q[row], k[row], v[row], method=method, key_mask=mask[row], is_causal=is_causal, generator=5, backend=backend
        )
        torch.testing.assert_close(whole[row], alone, atol=1e-6, rtol=1e-6)


@default_too
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("method", [Dense(), Smyrf(3, 16), Smyrf(3, 16, deduplicate=True), Smyrf(2, 200), *TANGENTS])
@pytest.mark.parametrize("poison", [1e4, torch.nan, torch.inf])
def test_masked_keys_and_values_have_no_effect(backend, is_causal, method, poison):
    q, k, v = problem()
    mask = torch.rand(2, 113) > 0.4
    run = lambda k, v: attention(  # noqa: E731
        q, k, v, method=method, key_mask=mask, is_causal=is_causal, generator=1, backend=backend
    )
    hidden = ~mask[:, None, :, None]
    clean = run(k, v)
    dirty = run(k.masked_fill(hidden, poison), v.masked_fill(hidden, -poison))
    assert torch.equal(clean, dirty)
    assert clean.isfinite().all()


@default_too
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("method", [Dense(), Smyrf(3, 16), *TANGENTS])
def test_a_fully_masked_row_gives_zeros_and_finite_gradients(backend, is_causal, method):
    q, k, v = (x.requires_grad_() for x in problem())
    mask = torch.ones(2, 113, dtype=torch.bool)
    mask[1] = False
    out = attention(q, k, v, method=method, key_mask=mask, is_causal=is_causal, generator=1, backend=backend)
    assert (out[1] == 0).all()
    assert (out[0] != 0).any()
    out.square().sum().backward()
    for x in (q, k, v):
        assert x.grad.isfinite().all()
        assert (x.grad[1] == 0).all()


@fast
@pytest.mark.parametrize("method", [Smyrf(3, 16), *TANGENTS])
def test_nan_in_one_row_of_the_batch_stays_there(backend, method):
    q, k, v = problem()
    clean = attention(q, k, v, method=method, generator=1, backend=backend)
    for x in (q, k, v):
        x[1, 0, 5] = torch.nan
    out = attention(q, k, v, method=method, generator=1, backend=backend)
    assert torch.equal(out[0], clean[0])
    assert out[1, 0].isnan().any()
    assert torch.equal(out[1, 1:], clean[1, 1:])  # nor does it leave its head


@fast
@pytest.mark.parametrize("method", [Smyrf(3, 16), *TANGENTS])
def test_nan_in_a_query_reaches_no_other_query(backend, method):
    q, k, v = problem()
    q[0, 0, 5] = torch.nan
    out = attention(q, k, v, method=method, generator=1, backend=backend)
    assert out[0, 0, 5].isnan().all()
    assert out[0, 0].isnan().any(-1).sum() == 1


@fast
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_those_of_the_function_that_was_computed(backend, is_causal):
    q, k, v = (x.requires_grad_() for x in problem(23, 19, 3, 2, 2, 1, 1, torch.float64))
    mask = torch.rand(2, 19) > 0.3
    # Clusters are piecewise constant: a step of 1e-6 stays inside one piece.
    run = lambda q, k, v: attention(  # noqa: E731
        q, k, v, method=Smyrf(2, 6), key_mask=mask, is_causal=is_causal, generator=4, backend=backend
    )
    assert torch.autograd.gradcheck(run, (q, k, v))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("method", [Smyrf(2, 6), Smyrf(2, 6, deduplicate=True), Dense()])
def test_the_reference_is_differentiable_twice(is_causal, method):
    inputs = [x.requires_grad_() for x in problem(13, 11, 3, 2, 1, 2, 1, torch.float64)]
    mask = torch.rand(1, 11) > 0.3
    run = lambda q, k, v: attention(  # noqa: E731
        q,
        k,
        v,
        method=method,
        key_mask=mask,
        is_causal=is_causal,
        dropout_p=0.2,
        enable_gqa=True,
        generator=4,
        backend="reference",
    )
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


# --- cases that earlier implementations got wrong -------------------------------------------------------


@default_too
def test_length_24_with_clusters_of_16_does_not_mix_rows(backend):
    q, k, v = problem(24, 24, 5, 5)
    base = attention(q, k, v, method=Smyrf(4, 16), generator=0, backend=backend)
    k2, v2, q2 = k.clone(), v.clone(), q.clone()
    q2[1], k2[1], v2[1] = torch.randn(3, 24, 5), torch.randn(3, 24, 5), torch.randn(3, 24, 5)
    other = attention(q2, k2, v2, method=Smyrf(4, 16), generator=0, backend=backend)
    assert torch.equal(base[0], other[0])
    assert not torch.allclose(base[1], other[1])


@default_too
@pytest.mark.parametrize("method", [Smyrf(3, 16), *TANGENTS])
def test_each_mask_goes_to_its_own_row(backend, method):
    q, k, _ = problem(40, 40, 5, 5)
    v = torch.arange(40.0).view(1, 1, 40, 1).expand(2, 3, 40, 5)
    mask = torch.stack([torch.arange(40) < 20, torch.arange(40) >= 20])
    out = attention(q, k, v, method=method, key_mask=mask, backend=backend)
    assert out[0].max() < 20
    assert out[1].min() > 19


@fast
@pytest.mark.parametrize("method", [Smyrf(3, 16), *TANGENTS])
def test_masked_keys_do_not_decide_about_the_others(backend, method):
    q, k, v = problem(40, 40, 5, 5)
    mask = torch.arange(40).expand(2, -1) < 30
    loud = k.clone()
    loud[:, :, 30:] = 1e3
    a = attention(q, k, v, method=method, key_mask=mask, generator=2, backend=backend)
    assert torch.equal(a, attention(q, loud, v, method=method, key_mask=mask, generator=2, backend=backend))


@fast
@pytest.mark.parametrize("method", [Smyrf(3, 16), *TANGENTS])
def test_short_rows_of_a_padded_batch_are_exact(backend, method):
    """Keys per cluster are counted with padding: a row with no more valid keys than that sees them all."""
    q, k, v = problem(128, 128, 8, 8)
    mask = torch.arange(128) < torch.tensor([[128], [11]])
    out = attention(q, k, v, method=method, key_mask=mask, backend=backend)
    exact = oracle.dense(q[1:], k[1:, :, :11], v[1:, :, :11], 8**-0.5)
    torch.testing.assert_close(out[1:].double(), exact, atol=1e-5, rtol=1e-5)


# --- quality --------------------------------------------------------------------------------------------


def relative_error(out, exact):
    return float((out - exact).norm() / exact.norm())


def test_more_rounds_and_larger_clusters_lower_the_error():
    q = torch.randn(1, 4, 512, 16)
    k = q + 0.3 * torch.randn(1, 4, 512, 16)
    v = torch.randn(1, 4, 512, 16)
    exact = attention(q, k, v, method=Dense(), scale=1.0)
    error = lambda method: relative_error(attention(q, k, v, method=method, scale=1.0, generator=0), exact)  # noqa: E731
    assert error(Smyrf(16, 32)) < error(Smyrf(4, 32)) < error(Smyrf(1, 32))
    assert error(Smyrf(4, 128)) < error(Smyrf(4, 32))
    assert error(Smyrf(16, 32, deduplicate=True)) < error(Smyrf(16, 32))


# --- NaN and infinity -----------------------------------------------------------------------------------


@default_too
@pytest.mark.parametrize("method", [Dense(), Smyrf(2, 32), *TANGENTS], ids=lambda method: method.label)
@pytest.mark.parametrize("length", [90, 600])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_comes_later_reaches_no_causal_output(backend, method, length, masked, bad):
    """Not even NaN or infinity in a later key or value; outputs that see it are what dense attention makes of it."""
    at = length - 33
    q, k, v = problem(length, length, 8, 6, 1, 2, 1)
    mask = (torch.rand(1, length) < 0.8) if masked else None
    if masked:
        mask[:, 0] = mask[:, at] = True
    options = {"method": method, "is_causal": True, "key_mask": mask, "enable_gqa": True, "generator": 3}
    clean_k, clean_v = k.clone(), v.clone()
    clean_k[:, :, at] = 0.0
    clean_v[:, :, at, 2] = 0.0
    k[:, :, at, 1] = bad
    q.requires_grad_()
    out = attention(q, k, v, backend=backend, **options)
    clean = attention(q, clean_k, v, backend=backend, **options)
    torch.testing.assert_close(out[:, :, :at], clean[:, :, :at], rtol=0, atol=0)
    assert out[:, :, at:].isnan().all()
    (dq,) = torch.autograd.grad(out[:, :, :at].sum(), q)
    assert dq.isfinite().all()
    k = clean_k
    v[:, :, at, 2] = bad
    out = attention(q, k, v, backend=backend, **options)
    clean = attention(q, k, clean_v, backend=backend, **options)
    torch.testing.assert_close(out[:, :, :at], clean[:, :, :at], rtol=0, atol=0)
    torch.testing.assert_close(out[:, :, at:, 2].detach(), torch.full((1, 2, 33), bad), equal_nan=True)
    torch.testing.assert_close(out[..., [0, 1, 3, 4, 5]], clean[..., [0, 1, 3, 4, 5]], rtol=0, atol=0)


@default_too
def test_a_masked_key_that_is_not_finite_reaches_no_causal_output(backend):
    q, k, v = problem(300, 300, 8, 6, 1, 2, 2)
    mask = torch.ones(1, 300, dtype=torch.bool)
    mask[:, 40] = False
    options = {"method": Tangent(40), "is_causal": True, "key_mask": mask, "backend": backend}
    clean = attention(q, k, v, **options)
    k[:, :, 40], v[:, :, 40] = torch.nan, torch.inf
    torch.testing.assert_close(attention(q, k, v, **options), clean)
