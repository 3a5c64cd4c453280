"""The modules of `smyrf.nn`."""

import pytest
import torch

import smyrf
from smyrf import Dense, Smyrf
from smyrf.nn import MultiheadAttention, SmyrfAttention

VARIANTS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other widths": {"kdim": 5, "vdim": 7},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True},
}


def pair(method=None, **arguments):
    """PyTorch's module and ours, with the same weights."""
    theirs = torch.nn.MultiheadAttention(24, 3, **arguments)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ours = MultiheadAttention(24, 3, method=method or Dense(), **arguments)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(batch_first=False, kdim=24, vdim=24, **_):
    q, k, v = torch.randn(11, 2, 24), torch.randn(13, 2, kdim), torch.randn(13, 2, vdim)
    return tuple(x.transpose(0, 1) for x in (q, k, v)) if batch_first else (q, k, v)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("padding", ["none", "bool", "float"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("attn_mask", [False, True])
def test_dense_equals_pytorchs_module(name, padding, need_weights, attn_mask):
    theirs, ours = pair(**VARIANTS[name])
    hidden = torch.rand(2, 13) > 0.6
    hidden[:, 0] = False
    bias = torch.zeros(2, 13).masked_fill(hidden, -torch.inf)
    mask = torch.randn(11, 13) if padding == "float" else torch.rand(11, 13) > 0.8
    arguments = {
        "key_padding_mask": {"none": None, "bool": hidden, "float": bias}[padding],
        "attn_mask": mask if attn_mask else None,
        "need_weights": need_weights,
    }
    x = inputs(**VARIANTS[name])
    expected, expected_weights = theirs(*x, **arguments)
    out, weights = ours(*x, **arguments)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    if need_weights:
        torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-5)
    else:
        assert weights is None


def test_state_dicts_go_both_ways():
    theirs, ours = pair()
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_causal_with_and_without_the_mask_itself():
    theirs, ours = pair(batch_first=True)
    x = torch.randn(2, 11, 24)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(11)
    expected, _ = theirs(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
    torch.testing.assert_close(ours(x, x, x, is_causal=True)[0], expected)
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask, is_causal=True)[0], expected)
    torch.testing.assert_close(ours(x, x, x, is_causal=True, need_weights=True)[0], expected)


def test_unbatched_input():
    theirs, ours = pair()
    q, k = torch.randn(11, 24), torch.randn(13, 24)
    hidden = torch.arange(13) > 8
    torch.testing.assert_close(ours(q, k, k, hidden)[0], theirs(q, k, k, hidden, need_weights=False)[0])
    weights = ours(q, k, k, hidden, need_weights=True)[1]
    torch.testing.assert_close(weights, theirs(q, k, k, hidden)[1])


def test_smyrf_in_one_cluster_is_dense_and_in_many_is_not():
    theirs, ours = pair(Smyrf(2, 64), batch_first=True)
    x = torch.randn(2, 50, 24)
    expected = theirs(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(ours(x, x, x)[0], expected)
    ours.method = Smyrf(1, 8)
    assert not torch.allclose(ours(x, x, x)[0], expected)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_it_is_not_bypassed_inside_pytorchs_encoder_layer(train, gradients):
    """The layer's fused path would read the weights and run dense attention."""
    layer = torch.nn.TransformerEncoderLayer(24, 3, 32, dropout=0.0, batch_first=True).train(train)
    ours = MultiheadAttention(24, 3, batch_first=True, method=Smyrf(1, 8), seed=0)
    ours.load_state_dict(layer.self_attn.state_dict())
    x = torch.randn(2, 50, 24)
    hidden = torch.arange(50).expand(2, -1) > 40
    with torch.set_grad_enabled(gradients):
        dense = layer(x, src_key_padding_mask=hidden)
        layer.self_attn = ours.train(train)
        approximate = layer(x, src_key_padding_mask=hidden)
        ours.method = Smyrf(1, 50)
        exact = layer(x, src_key_padding_mask=hidden)
    assert not torch.allclose(dense, approximate, atol=1e-4)
    torch.testing.assert_close(dense[:, :40], exact[:, :40], atol=1e-5, rtol=1e-5)


def test_training_reaches_all_weights():
    ours = MultiheadAttention(24, 3, dropout=0.1, batch_first=True, method=Smyrf(2, 8))
    x = torch.randn(2, 50, 24, requires_grad=True)
    ours(x, x, x)[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in ours.parameters())


def test_dropout_is_only_for_training():
    layer = SmyrfAttention(Smyrf(2, 8), dropout=0.5, seed=1)
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind()
    training, evaluation = layer(q, k, v), layer.eval()(q, k, v)
    assert not torch.allclose(training, evaluation)
    torch.testing.assert_close(evaluation, smyrf.attention(q, k, v, method=Smyrf(2, 8), generator=1))


def test_a_seeded_layer_repeats_itself_and_an_unseeded_one_does_not():
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind()
    seeded, unseeded = SmyrfAttention(Smyrf(1, 4), seed=1), SmyrfAttention(Smyrf(1, 4))
    assert torch.equal(seeded(q, k, v), seeded(q, k, v))
    assert not torch.equal(unseeded(q, k, v), unseeded(q, k, v))
    assert "n_hashes=1" in repr(seeded)


@pytest.mark.parametrize("need_weights", [False, True])
def test_padding_means_the_same_with_and_without_weights(need_weights):
    """Dense: a row of only padding gives zeros before the last projection, NaN in padding reaches nothing."""
    _, ours = pair(batch_first=True)
    x = torch.randn(2, 6, 24)
    hidden = torch.tensor([[False] * 4 + [True] * 2, [True] * 6])
    clean, _ = ours(x, x, x, hidden, need_weights=need_weights)
    dirty = x.masked_fill(hidden[..., None], torch.nan)
    out, _ = ours(x, dirty, dirty, hidden, need_weights=need_weights)
    assert torch.equal(out, clean)
    torch.testing.assert_close(out[1], ours.out_proj.bias.expand(6, -1))


def test_an_attn_mask_counts_as_it_does_in_pytorch():
    theirs, ours = pair(batch_first=True)
    x, mask = torch.randn(2, 6, 24), torch.rand(6, 6) > 0.5
    mask[:, 0] = False
    expected, map_ = theirs(x, x, x, attn_mask=mask, is_causal=True, need_weights=True)
    out, weights = ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, map_)
    assert ours(x[0], x[0], x[0], attn_mask=mask)[1] is None
    three = mask.expand(6, -1, -1)  # (batch · heads, N, M)
    torch.testing.assert_close(ours(x, x, x, attn_mask=three)[0], theirs(x, x, x, attn_mask=three)[0])


def test_a_seed_fixes_clusters_not_dropout():
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind()
    layer = SmyrfAttention(Smyrf(2, 8), dropout=0.3, seed=1)
    assert not torch.equal(layer(q, k, v), layer(q, k, v))
    torch.manual_seed(0)
    a = layer(q, k, v)
    torch.manual_seed(0)
    assert torch.equal(a, layer(q, k, v))


def test_weights_can_be_initialised_again():
    ours = MultiheadAttention(24, 3)
    before = ours.in_proj_weight.clone()
    ours._reset_parameters()
    assert not torch.equal(before, ours.in_proj_weight)
    assert "Smyrf(n_hashes=8" in repr(ours)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"query": torch.randn(2, 5, 23)}, ValueError, r"query has the shape \(2, 5, 23\), but its width must be 24"),
        ({"key": torch.randn(5, 24)}, ValueError, r"all have 2 or all 3 axes: key has \(5, 24\)"),
        ({"value": torch.randn(2, 5, 24).double()}, TypeError, "value is torch.float64, but the weights are"),
        ({"need_weights": True}, ValueError, "need_weights=True needs the N × M map"),
        ({"attn_mask": torch.zeros(5, 5)}, ValueError, r"attn_mask of shape \(5, 5\) cannot be honoured"),
        ({"key_padding_mask": torch.zeros(2, 4, dtype=torch.bool)}, ValueError, r"shape \(2, 4\), but \(2, 5\)"),
        ({"key_padding_mask": torch.zeros(2, 5, dtype=torch.int64)}, TypeError, "bool or floating, not torch.int64"),
        ({"key_padding_mask": torch.full((2, 5), -3.0)}, ValueError, "only 0 and -inf"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments, error, words):
    ours = MultiheadAttention(24, 3, batch_first=True, method=Smyrf(1, 2))
    x = torch.randn(2, 5, 24)
    with pytest.raises(error, match=words):
        ours(**{"query": x, "key": x, "value": x, **arguments})


def test_bad_constructor_arguments():
    with pytest.raises(TypeError, match="write Smyrf"):
        SmyrfAttention(Smyrf)
    with pytest.raises(ValueError, match=r"dropout=1.5"):
        SmyrfAttention(dropout=1.5)
    with pytest.raises(ValueError, match="scale=nan"):
        SmyrfAttention(scale=float("nan"))
    with pytest.raises(TypeError, match="method=3"):
        MultiheadAttention(24, 3, method=3)
    with pytest.raises(ValueError, match="seed=-1"):
        MultiheadAttention(24, 3, seed=-1)
    causal = MultiheadAttention(24, 3, add_bias_kv=True)
    x = torch.randn(5, 24)
    with pytest.raises(ValueError, match="add_bias_kv"):
        causal(x, x, x, is_causal=True)
