"""Attention calls of any PyTorch code, taken over inside a block."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import smyrf
from smyrf import Dense, PerHead, Smyrf, Tangent, intercept_sdpa
from smyrf.analysis.capture import CaptureAttention
from smyrf.models.report import Calls
from smyrf.models.sdpa import Interception
from smyrf.sdpa_mode import SdpaCall, SdpaMode

sdpa = F.scaled_dot_product_attention
N = 300
METHOD = Tangent(48)
HIDDEN = torch.arange(N).expand(2, -1) >= torch.tensor([[230], [N]])  # padding of two rows


def problem(n=N, m=N, heads=2, kv_heads=2, d=8, e=8):
    return torch.randn(2, heads, n, d), torch.randn(2, kv_heads, m, d), torch.randn(2, kv_heads, m, e)


def reason(calls):
    """Why the only call was dense."""
    assert calls.served == 0 and calls.total == 1
    return next(iter(calls.dense))


class TimmAttention(nn.Module):
    """Calls attention as timm's vision transformers do (timm itself needs torchvision, which is not installed here)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, attn_mask=None):
        B, n, C = x.shape
        q, k, v = self.qkv(x).reshape(B, n, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=0.0)
        return self.proj(x.transpose(1, 2).reshape(B, n, C))


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
        assert reason(calls) == "the method is exact at this length"


@pytest.mark.parametrize("lead", [(), (3,), (3, 5), (2, 3, 5)])
def test_any_number_of_leading_axes(lead):
    x = torch.randn(*lead, N, 8)
    hidden = torch.arange(N) > 230
    for mask, key_mask in ((None, None), (~hidden[None], ~hidden.expand(*lead[:-1], -1))):
        with intercept_sdpa(METHOD) as calls:
            out = sdpa(x, x, x, mask)
        if mask is not None and len(lead) == 3:
            assert reason(calls) == "it has a mask and more than four axes"
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
    "a bias": ({"attn_mask": torch.randn(N, N)}, "its mask adds a bias to the scores"),
    "a bias that is learned": ({"attn_mask": torch.zeros(N, N).requires_grad_()}, "its mask adds a bias to the scores"),
    "a mask for each head": ({"attn_mask": torch.rand(2, 2, 1, N) > 0.3}, "its mask differs between heads"),
    "another mask": ({"attn_mask": torch.rand(2, 1, N, N) > 0.3}, "its mask is neither padding nor causal"),
    "another mask and the flag": (
        {"attn_mask": torch.rand(2, 1, N, N) > 0.3, "is_causal": True},
        "its mask is neither padding nor causal",
    ),
    "an infinite scale": ({"scale": float("inf")}, "its arguments are for PyTorch's function alone"),
    "a scale in a tensor": ({"scale": torch.tensor(0.5)}, "its arguments are for PyTorch's function alone"),
}


@pytest.mark.parametrize("name", DENSE)
def test_what_cannot_be_served_is_dense_and_counted(name):
    arguments, why = DENSE[name]
    q, k, v = problem()
    with intercept_sdpa(METHOD) as calls:
        out = sdpa(q, k, v, **arguments)
    torch.testing.assert_close(out, sdpa(q, k, v, **arguments), rtol=0, atol=0, equal_nan=True)
    assert reason(calls) == why


@pytest.mark.parametrize(
    ("q", "k", "why"),
    [
        ((2, 2, 1, 8), (2, 2, N, 8), "one query"),
        ((2, 2, 0, 8), (2, 2, N, 8), "its arguments are for PyTorch's function alone"),
        ((2, 4, N, 8), (2, 1, N, 8), "its arguments are for PyTorch's function alone"),
        ((2, 4, N, 8), (1, 4, N, 8), "its arguments are for PyTorch's function alone"),
        ((2, 4, N, 8), (4, N, 8), "its arguments are for PyTorch's function alone"),
    ],
)
def test_shapes_that_only_pytorch_takes(q, k, why):
    q, k = torch.randn(q), torch.randn(k)
    with intercept_sdpa(METHOD) as calls:
        out = sdpa(q, k, k)
    assert torch.equal(out, sdpa(q, k, k))
    assert reason(calls) == why


def test_tensors_that_are_not_plain_data():
    x = torch.randn(2, 2, N, 8)
    meta = x.to("meta")
    nested = torch.nested.nested_tensor([x[0], x[1, :, :200]], layout=torch.jagged).transpose(1, 2)

    class Other(torch.Tensor):
        pass

    for y in (meta, nested, x.as_subclass(Other)):
        with intercept_sdpa(METHOD) as calls:
            assert sdpa(y, y, y).shape == y.shape
        assert reason(calls) == "its tensors are nested, without data or of another class"


def test_transforms_and_forward_derivatives_are_left_to_pytorch():
    x = torch.randn(3, 2, N, 8)
    with intercept_sdpa(METHOD) as calls:
        torch.func.vmap(lambda y: sdpa(y, y, y))(x)
    assert reason(calls) == "it is inside a transform of torch.func"
    with (
        intercept_sdpa(METHOD) as calls,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        forward_ad.dual_level(),
    ):
        y = forward_ad.make_dual(x, torch.ones_like(x))
        assert forward_ad.unpack_dual(sdpa(y, y, y)).tangent is not None
    assert reason(calls) == "it has forward-mode derivatives"


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
    assert reason(calls) == f"fewer than {N + 1} keys"
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


def test_outside_the_block_nothing_has_changed():
    before = F.scaled_dot_product_attention, F.multi_head_attention_forward, dict(vars(F))
    model = TimmAttention(16, 2)
    x = torch.randn(2, N, 16)
    dense = model(x)
    with intercept_sdpa(METHOD) as calls:
        approximate = model(x)
        with pytest.raises(RuntimeError), intercept_sdpa(Smyrf(1, 16)):
            model(x[..., :5])
        assert torch.equal(model(x), approximate)  # Tangent draws nothing
    assert calls.served == 2
    assert not torch.allclose(approximate, dense, atol=1e-4)
    assert torch.equal(model(x), dense)
    assert (F.scaled_dot_product_attention, F.multi_head_attention_forward, dict(vars(F))) == before


def test_gradients_flow():
    model = TimmAttention(16, 2)
    x = torch.randn(2, N, 16, requires_grad=True)
    with intercept_sdpa(METHOD):
        out = model(x)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in (x, *model.parameters()))


def test_the_innermost_block_counts():
    q, k, v = problem()
    with intercept_sdpa(Smyrf(2, 32)) as outer:
        with intercept_sdpa(METHOD) as inner:
            assert torch.equal(sdpa(q, k, v), smyrf.attention(q, k, v, method=METHOD))
            bias = torch.randn(N, N)
            dense = sdpa(q, k, v, bias)
        with intercept_sdpa(Dense()):
            assert torch.equal(dense, sdpa(q, k, v, bias))
            exact = sdpa(q, k, v)
        assert (inner.served, inner.total, outer.total) == (1, 2, 0)
        sdpa(q, k, v)
    assert (inner.total, outer.served) == (2, 1)
    assert torch.equal(exact, sdpa(q, k, v))


def test_our_own_function_says_its_own_method():
    q, k, v = problem()
    with intercept_sdpa(METHOD) as calls, CaptureAttention() as capture:
        out = smyrf.attention(q, k, v, method=Dense())
    assert torch.equal(out, sdpa(q, k, v))
    assert calls.total == 0
    assert len(capture.calls) == 1  # which remembers all calls, and leaves them to the block around it


def test_capture_leaves_the_calls_to_the_block_around_it():
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, N, 16)
    with intercept_sdpa(METHOD) as calls:
        expected = layer(x, x, x, need_weights=False)[0]
        with CaptureAttention() as capture:
            out = layer(x, x, x, need_weights=False)[0]
            layer(x, x, x)
    assert torch.equal(out, expected)
    assert (len(capture.calls), calls.served) == (1, 2)
    assert calls.dense == {"attention weights were asked for": 1}
    with CaptureAttention() as capture, intercept_sdpa(METHOD):
        layer(x, x, x, need_weights=False)
    assert not capture.calls


@torch.no_grad()
def run_in_threads(work, inputs):
    """What `work` gives for each input, all at once."""
    meet, results = threading.Barrier(len(inputs)), {}

    def run(given):
        torch.set_num_threads(1)
        meet.wait()
        results[given] = work(given)

    threads = [threading.Thread(target=run, args=(given,)) for given in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[given] for given in inputs]


def test_each_thread_has_its_own():
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, N, 16)

    def attend():
        return layer(x, x, x, need_weights=False)[0]

    def work(method):
        if method is None:
            return [attend() for _ in range(8)]
        with intercept_sdpa(method) as calls:
            found = [attend() for _ in range(8)]
        assert calls.served == 8
        return found

    methods = (Tangent(64), Tangent(32), None)
    with intercept_sdpa(Smyrf(1, 16)) as mine:  # which is this thread's alone
        results = run_in_threads(work, methods)
    assert mine.total == 0
    for method, found in zip(methods, results, strict=True):
        with intercept_sdpa(method or Dense()):
            expected = attend()
        assert all(torch.equal(one, expected) for one in found)


def test_capture_sees_the_calls_of_its_own_thread():
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(1, 5, 16)

    def work(times):
        with CaptureAttention() as capture:
            for _ in range(times):
                layer(x, x, x, need_weights=False)
        return len(capture.calls)

    assert run_in_threads(work, (20, 30)) == [20, 30]


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
    assert reason(calls) == "attention weights were asked for"


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


def by_method_of_tensor(out, x):
    out.sum().backward()
    return x.grad


def by_function(out, x):
    torch.autograd.backward(out.sum())
    return x.grad


def by_grad(out, x):
    return torch.autograd.grad(out.sum(), x)[0]


@pytest.mark.parametrize(
    ("backward", "use_reentrant"),
    [(by_method_of_tensor, True), (by_method_of_tensor, False), (by_function, False), (by_grad, False)],
)
def test_checkpointing_makes_the_same_clusters_inside_the_block(backward, use_reentrant):
    def run(y):
        return sdpa(y, y, y).sin()

    gradients = []
    for wrap in (lambda y: checkpoint(run, y, use_reentrant=use_reentrant), run):
        torch.manual_seed(1)
        x = torch.randn(1, 2, N, 8, requires_grad=True)
        with intercept_sdpa(Tangent(64)) as outer, intercept_sdpa(Smyrf(1, 16)) as calls:
            gradients.append(backward(wrap(x), x))
        assert calls.served == (2 if wrap is not run else 1)
        assert outer.total == 0
    assert torch.equal(*gradients)


def test_checkpointing_with_the_backward_pass_outside_is_refused_by_pytorch():
    x = torch.randn(1, 2, N, 8, requires_grad=True)
    with intercept_sdpa(METHOD):
        out = checkpoint(lambda y: sdpa(y, y, y).sin(), x, use_reentrant=False)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        out.sum().backward()


@torch.no_grad()
def test_compiled_code_obeys_the_block_around_its_call():
    torch._dynamo.reset()
    model, x = TimmAttention(16, 2), torch.randn(2, N, 16)
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    mask = ~HIDDEN[:, None, None]

    def run(x):
        return model(x, mask) + layer(x, x, x, need_weights=False)[0]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for method in (METHOD, Tangent(32)):
        with intercept_sdpa(method) as calls:
            expected = run(x)
            assert calls.total == 2
            torch.testing.assert_close(compiled(x), expected)
            assert calls.total == 2
    torch.testing.assert_close(compiled(x), run(x))


def test_compiled_code_looks_at_a_mask_in_a_graph_break():
    torch._dynamo.reset()
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, N, 16)

    def run(x):
        return layer(x, x, x, HIDDEN, need_weights=False)[0]

    with torch.no_grad(), intercept_sdpa(METHOD):
        torch.testing.assert_close(torch.compile(run, backend="eager")(x), run(x))


def test_compiled_code_may_hold_the_mode_in_a_thread_that_has_attended_to_nothing_yet():
    torch._dynamo.reset()
    q, k, v = problem()
    mode = Interception(METHOD, Calls())

    def run(q):
        with mode:
            return sdpa(q.sin(), k, v)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found = run_in_threads(lambda _: [compiled(q) for _ in range(3)], "a")[0]
    expected = smyrf.attention(q.sin(), k, v, method=METHOD)
    assert all(torch.allclose(out, expected, atol=1e-6) for out in found)


def test_another_mode_around_the_block_still_sees_the_dense_call():
    seen = []

    class Other(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(1, 2, 1, 8)
    with Other(), intercept_sdpa(METHOD):
        sdpa(x, x, x)
    assert seen.count(sdpa) == 1


def test_a_mode_that_does_not_say_how_it_attends_changes_nothing():
    x = torch.randn(1, 2, 5, 4)
    assert SdpaCall(x, x, x).scale is None
    expected = sdpa(x, x, x)
    with SdpaMode():
        assert torch.equal(sdpa(x, x, x), expected)


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
