"""What a block reaches: other blocks and modes, threads, the backward pass, compiled code, and nothing outside it."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import smyrf
from sdpa_problem import HIDDEN, METHOD, N, problem
from smyrf import Dense, Smyrf, Tangent, intercept_sdpa
from smyrf.call import Reason
from smyrf.models.capture import CaptureAttention
from smyrf.models.report import Calls
from smyrf.models.sdpa import Interception
from smyrf.models.sdpa_calls import SdpaMode

sdpa = F.scaled_dot_product_attention


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


# Other blocks and modes


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
    assert calls.dense == {Reason.WEIGHTS: 1} == {"attention weights were asked for": 1}
    with CaptureAttention() as capture, intercept_sdpa(METHOD):
        layer(x, x, x, need_weights=False)
    assert not capture.calls


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
    expected = sdpa(x, x, x)
    with SdpaMode():
        assert torch.equal(sdpa(x, x, x), expected)


# Threads


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


# The backward pass


def test_gradients_flow():
    model = TimmAttention(16, 2)
    x = torch.randn(2, N, 16, requires_grad=True)
    with intercept_sdpa(METHOD):
        out = model(x)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in (x, *model.parameters()))


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


# Compiled code


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
