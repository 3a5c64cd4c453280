"""Single calls of PyTorch's attention inside a block: those that are ours, and those that stay dense and why."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import smyrf
from sdpa_problem import HIDDEN, METHOD, N, problem, reason
from smyrf import Dense, PerHead, Smyrf, Tangent, intercept_sdpa
from smyrf.call import Reason

sdpa = F.scaled_dot_product_attention
CALLS = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {"is_causal": True}),
    "scale": ({"scale": 0.7}, {"scale": 0.7}),
    "padding": ({"attn_mask": ~HIDDEN[:, None, None]}, {"key_mask": ~HIDDEN}),
    "padding of a row for each query": (
        {"attn_mask": (~HIDDEN[:, None, None]).repeat(1, 2, N, 1)},
        {"key_mask": ~HIDDEN},
    ),
    "padding that is added": (
        {"attn_mask": torch.zeros(2, 1, 1, N).masked_fill(HIDDEN[:, None, None], -1e4)},
        {"key_mask": ~HIDDEN},
    ),
    "causal mask": ({"attn_mask": torch.ones(N, N).tril().bool()}, {"is_causal": True}),
    "causal mask with padding": (
        {"attn_mask": torch.ones(N, N).tril().bool() & ~HIDDEN[:, None, None]},
        {"is_causal": True, "key_mask": ~HIDDEN},
    ),
    "causal flag with padding": (
        {"attn_mask": ~HIDDEN[:, None, None], "is_causal": True},
        {"is_causal": True, "key_mask": ~HIDDEN},
    ),
    "all may be seen": ({"attn_mask": torch.ones(2, 1, N, N, dtype=torch.bool)}, {}),
    "nothing is added": ({"attn_mask": torch.zeros(N, N)}, {}),
}


@pytest.mark.parametrize("method", [METHOD, Smyrf(2, 32), PerHead((METHOD, Dense()))], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_that_of_smyrf(name, method):
    theirs, ours = CALLS[name]
    q, k, v = problem()
    torch.manual_seed(1)
    expected = smyrf.attention(q, k, v, method=method, **ours)
    torch.manual_seed(1)
    with intercept_sdpa(method) as calls:
        out = sdpa(q, k, v, **theirs)
    assert torch.equal(out, expected)
    assert (calls.served, calls.total) == (1, 1)


@pytest.mark.parametrize("name", CALLS)
def test_a_method_that_is_exact_is_dense_attention_itself(name):
    theirs, _ = CALLS[name]
    q, k, v = problem()
    for method in (Dense(), Smyrf(2, N), Tangent(1.0)):
        with intercept_sdpa(method) as calls:
            out = sdpa(q, k, v, **theirs)
        assert torch.equal(out, sdpa(q, k, v, **theirs))
        assert reason(calls) is Reason.EXACT


@pytest.mark.parametrize("lead", [(), (3,), (3, 5), (2, 3, 5)])
def test_any_number_of_leading_axes(lead):
    x = torch.randn(*lead, N, 8)
    hidden = torch.arange(N) > 230
    for mask, key_mask in ((None, None), (~hidden[None], ~hidden.expand(*lead[:-1], -1))):
        with intercept_sdpa(METHOD) as calls:
            out = sdpa(x, x, x, mask)
        if mask is not None and len(lead) == 3:
            assert reason(calls) is Reason.MASK_AXES
        else:
            assert torch.equal(out, smyrf.attention(x, x, x, method=METHOD, key_mask=key_mask))


def test_other_widths_other_lengths_and_shared_keys():
    q, k, v = problem(m=311, heads=4, e=5)
    with intercept_sdpa(METHOD) as calls:
        out = sdpa(q, k, v, enable_gqa=True)
    assert torch.equal(out, smyrf.attention(q, k, v, method=METHOD, enable_gqa=True))
    assert calls.served == 1


def test_dropout_drops():
    q, k, v = problem()
    with intercept_sdpa(METHOD):
        torch.manual_seed(1)
        out = sdpa(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(out, smyrf.attention(q, k, v, method=METHOD, dropout_p=0.5))


def test_masks_reach_the_right_rows():
    q, k, v = problem()
    hidden = torch.stack([torch.arange(N) < 100, torch.arange(N) >= 100])
    with intercept_sdpa(METHOD):
        out = sdpa(q, k, v, ~hidden[:, None, None])
        for row in range(2):
            k[row, :, hidden[row]] = v[row, :, hidden[row]] = 7.0
        assert torch.equal(sdpa(q, k, v, ~hidden[:, None, None]), out)
        k[1] = 3.0
        changed = sdpa(q, k, v, ~hidden[:, None, None])
    assert torch.equal(changed[0], out[0]) and not torch.allclose(changed[1], out[1])


DENSE = {
    "a bias": ({"attn_mask": torch.randn(N, N)}, Reason.BIAS),
    "a bias that is learned": ({"attn_mask": torch.zeros(N, N).requires_grad_()}, Reason.BIAS),
    "a mask for each head": ({"attn_mask": torch.rand(2, 2, 1, N) > 0.3}, Reason.HEAD_MASK),
    "another mask": ({"attn_mask": torch.rand(2, 1, N, N) > 0.3}, Reason.OTHER_MASK),
    "another mask and the flag": (
        {"attn_mask": torch.rand(2, 1, N, N) > 0.3, "is_causal": True},
        Reason.OTHER_MASK,
    ),
    "an infinite scale": ({"scale": float("inf")}, Reason.FOREIGN),
    "a scale in a tensor": ({"scale": torch.tensor(0.5)}, Reason.FOREIGN),
}


@pytest.mark.parametrize("name", DENSE)
def test_what_cannot_be_served_is_dense_and_counted(name):
    arguments, why = DENSE[name]
    q, k, v = problem()
    with intercept_sdpa(METHOD) as calls:
        out = sdpa(q, k, v, **arguments)
    torch.testing.assert_close(out, sdpa(q, k, v, **arguments), rtol=0, atol=0, equal_nan=True)
    assert reason(calls) is why


@pytest.mark.parametrize(
    ("q", "k", "why"),
    [
        ((2, 2, 1, 8), (2, 2, N, 8), Reason.ONE_QUERY),
        ((2, 2, 0, 8), (2, 2, N, 8), Reason.FOREIGN),
        ((2, 4, N, 8), (2, 1, N, 8), Reason.FOREIGN),
        ((2, 4, N, 8), (1, 4, N, 8), Reason.FOREIGN),
        ((2, 4, N, 8), (4, N, 8), Reason.FOREIGN),
    ],
)
def test_shapes_that_only_pytorch_takes(q, k, why):
    q, k = torch.randn(q), torch.randn(k)
    with intercept_sdpa(METHOD) as calls:
        out = sdpa(q, k, k)
    assert torch.equal(out, sdpa(q, k, k))
    assert reason(calls) is why


def test_tensors_that_are_not_plain_data():
    x = torch.randn(2, 2, N, 8)
    meta = x.to("meta")
    nested = torch.nested.nested_tensor([x[0], x[1, :, :200]], layout=torch.jagged).transpose(1, 2)

    class Other(torch.Tensor):
        pass

    for y in (meta, nested, x.as_subclass(Other)):
        with intercept_sdpa(METHOD) as calls:
            assert sdpa(y, y, y).shape == y.shape
        assert reason(calls) is Reason.TENSOR_CLASS


@pytest.mark.parametrize("kind", ["causal_upper_left", "causal_lower_right"])
def test_masks_of_another_class_are_left_to_pytorch(kind):
    """The data of PyTorch's CausalBias are never written: to read them would be to read anything."""
    from torch.nn.attention import bias

    q, k, v = torch.randn(3, 1, 2, 600, 8).unbind()
    mask = getattr(bias, kind)(600, 600)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with intercept_sdpa(Tangent(0.25)) as calls:
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(found, expected)
    assert calls.served == 0


def test_transforms_and_forward_derivatives_are_left_to_pytorch():
    x = torch.randn(3, 2, N, 8)
    with intercept_sdpa(METHOD) as calls:
        torch.func.vmap(lambda y: sdpa(y, y, y))(x)
    assert reason(calls) is Reason.FUNCTORCH
    with (
        intercept_sdpa(METHOD) as calls,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        forward_ad.dual_level(),
    ):
        y = forward_ad.make_dual(x, torch.ones_like(x))
        assert forward_ad.unpack_dual(sdpa(y, y, y)).tangent is not None
    assert reason(calls) is Reason.FORWARD_MODE


def test_an_empty_batch_or_no_heads():
    for shape in ((0, 2, N, 8), (2, 0, N, 8)):
        x, seen = torch.randn(shape), ~HIDDEN[: shape[0], None, None]
        with intercept_sdpa(METHOD):
            assert sdpa(x, x, x, seen).shape == sdpa(x, x, x).shape == shape


def test_few_keys_can_stay_dense():
    q, k, v = problem()
    with intercept_sdpa(METHOD, from_keys=N + 1) as calls:
        out = sdpa(q, k, v)
    assert torch.equal(out, sdpa(q, k, v))
    assert reason(calls) is Reason.FEW_KEYS
    with intercept_sdpa(METHOD, from_keys=N) as calls:
        sdpa(q, k, v)
    assert calls.served == 1
    for from_keys, error in ((-1, ValueError), (2.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"from_keys={from_keys}"), intercept_sdpa(METHOD, from_keys=from_keys):
            pytest.fail("the block ran")


def test_wrong_arguments_get_pytorchs_own_error():
    q, k, v = problem()
    with intercept_sdpa(METHOD) as calls:
        for arguments in (
            {"attn_mask": torch.ones(5, 7).bool()},
            {"attn_mask": torch.ones(N).bool()},
            {"dropout_p": 2.0},
            {"no_such": 1},
        ):
            with pytest.raises((RuntimeError, TypeError, IndexError)) as ours:
                sdpa(q, k, v, **arguments)
            with intercept_sdpa(Dense()), pytest.raises(type(ours.value)) as theirs:
                sdpa(q, k, v, **arguments)
            assert str(ours.value) == str(theirs.value)
    assert calls.total == 0


def test_a_bad_method_is_refused_before_anything():
    with pytest.raises(TypeError, match="write Tangent"), intercept_sdpa(Tangent):
        pytest.fail("the block ran")
    q, k, v = problem()
    with intercept_sdpa(PerHead((METHOD,) * 3)), pytest.raises(ValueError, match="3 methods for the 2 heads"):
        sdpa(q, k, v)


@pytest.mark.parametrize("method", [METHOD, Smyrf(2, N)], ids=["approximate", "exact"])
def test_the_named_backend_serves_the_calls(monkeypatch, method):
    """A named backend also serves calls for which the method is exact."""
    named = []

    def attention(*args, backend, **options):
        named.append(backend)
        return smyrf.attention(*args, backend=backend, **options)

    monkeypatch.setattr("smyrf.models.calls.attention", attention)
    q, k, v = problem()
    with intercept_sdpa(method, backend="reference") as calls:
        out = sdpa(q, k, v)
    torch.testing.assert_close(out, smyrf.attention(q, k, v, method=method, backend="reference"))
    assert (named, calls.served, calls.total) == (["reference"], 1, 1)


def test_an_unknown_backend_is_refused_before_the_block_runs():
    with pytest.raises(ValueError, match="backend='fastest' must be"), intercept_sdpa(METHOD, backend="fastest"):
        pytest.fail("the block ran")
