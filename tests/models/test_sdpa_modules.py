"""PyTorch's own modules inside a block, on all their paths: `MultiheadAttention`, `TransformerEncoder`, the decoder."""

import pytest
import torch
from torch import nn

import smyrf
from sdpa_problem import HIDDEN, METHOD, N, reason
from smyrf import Dense, intercept_sdpa
from smyrf.call import Reason
from smyrf.models.capture import CaptureAttention

MODULES = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "other widths": {"kdim": 5, "vdim": 7, "batch_first": True},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_multihead_attention_on_all_paths(name, padded, gradients, train):
    options = {"dropout": 0.0, **MODULES[name]}
    theirs = nn.MultiheadAttention(24, 3, **options).train(train)
    ours = smyrf.nn.MultiheadAttention(24, 3, method=METHOD, **options).train(train)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, N, 24)
    k, v = (x, x) if "kdim" not in options else (torch.randn(2, N, 5), torch.randn(2, N, 7))
    if not options.get("batch_first"):
        x = k = v = x.transpose(0, 1)
    hidden = HIDDEN if padded else None
    with torch.set_grad_enabled(gradients):
        dense = theirs(x, k, v, hidden, need_weights=False)[0]
        with intercept_sdpa(METHOD) as calls:
            out = theirs(x, k, v, hidden, need_weights=False)[0]
        with intercept_sdpa(Dense()):
            exact = theirs(x, k, v, hidden, need_weights=False)[0]
        expected = ours(x, k, v, hidden)[0]
    assert calls.served == calls.total == 1
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(exact, dense)
    assert not torch.allclose(out, dense, atol=1e-4)


def test_multihead_attention_of_one_sequence():
    layer, x = nn.MultiheadAttention(24, 3), torch.randn(N, 24)
    with intercept_sdpa(METHOD) as calls:
        out = layer(x, x, x, HIDDEN[0], need_weights=False)[0]
        batch = layer(x[:, None], x[:, None], x[:, None], HIDDEN[:1], need_weights=False)[0]
    assert calls.served == 2
    torch.testing.assert_close(out, batch[:, 0])


@pytest.mark.parametrize("train", [True, False])
def test_weights_that_are_asked_for_are_dense(train):
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True).train(train), torch.randn(2, N, 16)
    with torch.no_grad(), intercept_sdpa(METHOD) as calls:
        out, weights = layer(x, x, x, HIDDEN, average_attn_weights=False)
    expected, map_ = layer(x, x, x, HIDDEN, average_attn_weights=False)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, map_)
    assert reason(calls) is Reason.WEIGHTS


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("hint", [True, False])
def test_causal_multihead_attention(hint, padded):
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, N, 16)
    ours = smyrf.nn.MultiheadAttention(16, 2, batch_first=True, method=METHOD)
    ours.load_state_dict(layer.state_dict())
    mask = ~torch.ones(N, N).tril().bool()
    hidden = HIDDEN if padded else None
    with intercept_sdpa(METHOD) as calls:
        out = layer(x, x, x, hidden, attn_mask=mask, is_causal=hint, need_weights=False)[0]
    assert calls.served == 1
    torch.testing.assert_close(out, ours(x, x, x, hidden, is_causal=True)[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("given", ["nothing", "padding", "causal"])
def test_transformer_encoder_on_all_paths(given, batch_first, gradients, train):
    """Without gradients it would run fused in evaluation, on nested tensors where there is padding."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first).train(train)
    x = torch.randn(2, N, 16)
    arguments = {
        "nothing": {},
        "padding": {"src_key_padding_mask": HIDDEN},
        "causal": {"mask": nn.Transformer.generate_square_subsequent_mask(N), "is_causal": True},
    }[given]
    seen = ~HIDDEN if given == "padding" else torch.ones(2, N, dtype=torch.bool)

    def run():
        out = model(x if batch_first else x.transpose(0, 1), **arguments)
        return out if batch_first else out.transpose(0, 1)

    with torch.set_grad_enabled(gradients):
        dense = run()
        with intercept_sdpa(METHOD) as calls:
            out = run()
        with intercept_sdpa(Dense()) as exact_calls:
            exact = run()
        after = run()
    assert (calls.served, calls.total, exact_calls.total) == (2, 2, 2)
    torch.testing.assert_close(exact[seen], dense[seen], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(out[seen], dense[seen], atol=1e-4)
    assert torch.equal(after, dense)


def test_transformer_decoder_and_its_cross_attention():
    layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x, memory = torch.randn(2, N, 16), torch.randn(2, 300, 16)
    arguments = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(N),
        "tgt_is_causal": True,
        "memory_key_padding_mask": torch.arange(300).expand(2, -1) > 250,
    }
    with CaptureAttention() as capture:
        layer(x, memory, **arguments)
    assert [call.k.shape[2] for call in capture.calls] == [N, 300]
    with intercept_sdpa(METHOD) as calls:
        out = layer(x, memory, **arguments)
        memory[:, 251:] = 7.0
        assert torch.equal(layer(x, memory, **arguments), out)
    assert calls.served == calls.total == 4


def test_autocast_is_obeyed():
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, N, 16)
    with torch.autocast("cpu", torch.bfloat16), intercept_sdpa(METHOD) as calls:
        assert layer(x, x, x, need_weights=False)[0].dtype == torch.bfloat16
    assert calls.served == 1
