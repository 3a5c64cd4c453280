"""PyTorch's conventions: arguments, axes, dtypes and modes mean what they mean to its own function."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import oracle
from problems import TANGENTS, backends, default_too, fast, problem
from smyrf import Dense, Smyrf, Tangent, attention
from smyrf.backends import BACKENDS


@pytest.mark.parametrize("method", [Dense(), Smyrf(2, 500)])
@default_too
def test_arguments_mean_what_they_mean_to_pytorch(method, backend):
    q, k, v = problem(n=83, m=61, d=8, e=8, heads=6, kv_heads=2)
    for arguments in (
        {"is_causal": True, "enable_gqa": True},
        {"scale": 0.7, "enable_gqa": True},
    ):
        ours = attention(q, k, v, method=method, backend=backend, **arguments)
        theirs = F.scaled_dot_product_attention(q, k, v, **arguments)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    mask = torch.rand(2, 61) > 0.3
    ours = attention(q, k, v, method=method, key_mask=mask, enable_gqa=True, backend=backend)
    theirs = F.scaled_dot_product_attention(q, k, v, mask[:, None, None], enable_gqa=True)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@backends
@pytest.mark.parametrize("method", [Dense(), Smyrf(2, 16), Tangent(32)])
@pytest.mark.parametrize("scale", [-1e-4, 0.0])
def test_gradients_of_a_scale_that_is_not_positive_are_finite_in_half_precision(backend, method, scale):
    """Without the scale they would overflow."""
    q, k, v = (x * torch.randn(1, 2, 128, 16) for x in (1.0, 1e4, 1e3))
    q, k, v = (x.half().requires_grad_() for x in (q, k, v))
    grad = torch.autograd.grad(attention(q, k, v, method=method, scale=scale, backend=backend).sum(), q)[0]
    assert grad.isfinite().all()
    assert (grad != 0).any() == (scale != 0)


@default_too
@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_a_scale_that_is_not_positive_is_a_scale(backend, scale):
    """PyTorch's own function gives NaN for these in its causal form."""
    q, k, v = problem(40, 40)
    for method in (Dense(), Smyrf(2, 40)):
        out = attention(q, k, v, method=method, scale=scale, is_causal=True, backend=backend)
        expected = oracle.dense(q, k, v, scale, torch.ones(40, 40, dtype=torch.bool).tril())
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@fast
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 2, 3)])
@pytest.mark.parametrize("method", [Dense(), Smyrf(2, 8), *TANGENTS])
def test_any_number_of_leading_axes(backend, lead, method):
    q, k, v = torch.randn(*lead, 30, 4), torch.randn(*lead, 20, 4), torch.randn(*lead, 20, 6)
    mask = torch.rand(*lead[:-1], 20) > 0.3
    out = attention(q, k, v, method=method, key_mask=mask, generator=0, backend=backend)
    assert out.shape == (*lead, 30, 6)
    flat = [x.reshape(-1, lead[-1] if lead else 1, *x.shape[-2:]) for x in (q, k, v)]
    same = attention(*flat, method=method, key_mask=mask.reshape(-1, 20), generator=0, backend=backend)
    torch.testing.assert_close(out, same.view_as(out))


@pytest.mark.parametrize("is_causal", [False, True])
def test_meta_tensors_give_shapes(is_causal):
    q = torch.empty(2, 3, 300, 8, device="meta")
    for method in (Dense(), Smyrf(2, 16), Smyrf(2, 16, deduplicate=True)):
        assert attention(q, q, q, method=method, is_causal=is_causal).shape == q.shape


@default_too
@pytest.mark.parametrize(("batch", "heads"), [(0, 3), (2, 0)])
@pytest.mark.parametrize("method", [Dense(), Smyrf(2, 8), *TANGENTS])
def test_an_empty_batch_gives_an_empty_result(backend, batch, heads, method):
    q, k, v = problem(batch=batch, heads=heads, kv_heads=heads)
    mask = torch.ones(batch, 113, dtype=torch.bool)
    assert attention(q, k, v, method=method, key_mask=mask, backend=backend).shape == (batch, heads, 97, 17)


@fast
def test_evaluating_in_inference_mode_does_not_spoil_later_training(backend):
    def work():
        x = torch.randn(1, 2, 100, 8)
        with torch.inference_mode():
            attention(x, x, x, method=Smyrf(2, 16), backend=backend)
        y = torch.randn(1, 2, 100, 8, requires_grad=True)
        attention(y, y, y, method=Smyrf(2, 16), backend=backend).sum().backward()
        return y.grad

    with ThreadPoolExecutor(1) as pool:  # a new thread: nothing has been kept in it yet
        assert pool.submit(work).result().isfinite().all()


def test_forward_mode_is_exact_in_the_reference_and_refused_elsewhere():
    q, k, v = (x[:, :, :23] for x in problem(23, 23, 3, 2, dtype=torch.float64))
    run = lambda q, backend: attention(q, k, v, method=Smyrf(2, 8), generator=0, backend=backend)  # noqa: E731
    step = torch.randn_like(q)
    _, tangent = torch.func.jvp(lambda q: run(q, "reference"), (q,), (step,))
    numeric = (run(q + 1e-6 * step, "reference") - run(q - 1e-6 * step, "reference")) / 2e-6
    torch.testing.assert_close(tangent, numeric, atol=1e-7, rtol=1e-6)
    for backend in (None, *BACKENDS.keys() - {"reference"}):
        with pytest.raises(RuntimeError, match="pass backend='reference'"):
            torch.func.jvp(lambda q, backend=backend: run(q, backend), (q,), (step,))


@fast
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_half_precision_within_twice_the_error_of_dense(backend, dtype, is_causal):
    """Exact mode against PyTorch in the same dtype, both against float64."""
    q, k, v = (x.to(dtype) for x in problem(n=311, m=311, d=16, e=16))
    sees = torch.ones(311, 311, dtype=torch.bool).tril() if is_causal else None
    exact = oracle.dense(q, k, v, 0.25, sees)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    ours = attention(q, k, v, method=Smyrf(3, 400), is_causal=is_causal, backend=backend)
    assert (ours.double() - exact).abs().max() <= 2 * (theirs.double() - exact).abs().max()


@fast
@pytest.mark.parametrize("method", [Dense(), Smyrf(2, 16), *TANGENTS])
def test_autocast_does_what_it_does_to_pytorchs_function(backend, method):
    q, k, v = (x.requires_grad_() for x in problem(64, 64, 8, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v, method=method, generator=1, backend=backend)
        assert out.dtype == F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        mixed = attention(q, k.bfloat16(), v, method=method, generator=1, backend=backend)
    assert torch.equal(out, mixed)
    by_hand = attention(*(x.bfloat16() for x in (q, k, v)), method=method, generator=1, backend=backend)
    assert torch.equal(out, by_hand)
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32


@backends
@pytest.mark.parametrize("method", [Smyrf(2, 8), Tangent(24)], ids=["smyrf", "tangent"])
def test_autocast_changes_only_the_dtype_of_the_inputs(backend, method):
    q, k, v = problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(q, k, v, method=method, generator=1, backend=backend)
    low = [x.to(torch.bfloat16) for x in (q, k, v)]
    assert torch.equal(found, attention(*low, method=method, generator=1, backend=backend))
