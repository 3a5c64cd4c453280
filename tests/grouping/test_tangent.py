"""Tangent attention: what it promises beyond what all methods promise (tests/test_attention_*.py), on every backend."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from problems import (
    FAST,
    assert_close,
    attend,
    backends,
    clustered_problem,
    fast,
    make_call,
    make_groups,
    output_and_gradients,
)
from smyrf import Smyrf, Tangent, attention
from smyrf.backends import find_backend
from smyrf.backends.torch import candidates, gather, near, rows
from smyrf.backends.torch.candidates import Candidates
from smyrf.grouping.groups import FarKeys, Groups
from smyrf.grouping.tangent import far_index
from smyrf.methods import Level

levelled = pytest.mark.parametrize("n_levels", [1, 2, 3])
masked = pytest.mark.parametrize("is_masked", [False, True])
causal = pytest.mark.parametrize("is_causal", [False, True])


def method_of(n_levels, budget=40, **sizes):
    return Tangent(budget, levels=n_levels, **sizes)


def mask_of(is_masked, batch, m, few=False):
    """A mask that hides some keys, and with `few` all but a few in the last row; or None."""
    if not is_masked:
        return None
    mask = torch.rand(batch, m) < 0.7
    if few:
        mask[-1, m // 10 :] = False
    return mask


@backends
@levelled
def test_the_list_is_what_the_sizes_say(backend, n_levels):
    q, k, v = clustered_problem(512, 512, batch=1, heads=2, kv_heads=1)
    method = method_of(n_levels)
    (groups,) = make_groups(q, k, v, method, backend)
    sizes = method.sizes(512)
    assert len(sizes) == n_levels
    assert groups.shape == (2, sizes[-1].n_clusters, sizes[-1].cluster_size, sizes[-1].n_near)
    assert groups.n_far == sum(level.n_far for level in sizes)
    assert groups.far.bias.shape == (2, sum(level.n_clusters * level.n_far for level in sizes))  # once per cluster


@backends
@levelled
@masked
def test_every_key_counts_once_at_the_centroid(backend, n_levels, is_masked):
    """With one query per cluster, at all levels, near keys and far keys have all the mass: the output is exact."""
    q, k, v = clustered_problem(64, 300, heads=2, kv_heads=2)
    mask = mask_of(is_masked, 2, 300, few=True)
    kept = [300, 120, 60, 20][-n_levels:]
    levels = tuple(Level(64, 1, n, s, 2) for n, s in zip([300, *kept[:-1]], kept, strict=True))
    run = find_backend(backend)
    call = run.prepare(make_call(q, k, v, key_mask=mask))
    tree = run.build_tree(call, 64, 8)
    near_keys, *far = run.select_and_fold(call, tree, levels)
    groups = Groups(tree.queries, near_keys, far=FarKeys(*far, far_index(levels, q.device)))
    out, _ = attend(call.q, call.k, call.v, [groups], backend, scale=0.3)
    expected = oracle.dense(q, k, v, 0.3, None if mask is None else mask[:, None, None].expand(2, 2, 64, 300))
    torch.testing.assert_close(out, expected)


@fast
@levelled
@masked
@causal
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_all_backends_agree_with_gradients(backend, n_levels, is_masked, is_causal, dropout_p):
    """Every backend by its own stages, against the plain PyTorch of the reference: in float64, to rounding."""
    inputs = clustered_problem(260, 275, batch=2, heads=2, kv_heads=1) if is_causal else clustered_problem(batch=2)
    # With several levels, which masked keys fill up what a level keeps is a tie.
    mask = mask_of(is_masked, 2, inputs[1].shape[2], few=n_levels == 1)
    options = {"key_mask": mask, "is_causal": is_causal, "dropout_p": dropout_p, "enable_gqa": True, "generator": 3}
    found, expected = (
        output_and_gradients(lambda *x: attention(*x, method=method_of(n_levels), backend=name, **options), *inputs)  # noqa: B023
        for name in (backend, "reference")
    )
    assert_close(found, expected, atol=1e-10, rtol=1e-10)


@backends
@levelled
@masked
@causal
def test_gradients_of_keys_and_values_are_those_of_the_function(backend, n_levels, is_masked, is_causal):
    """Against numerical derivatives in float64: through near keys, far keys, their weights and biases."""
    q, k, v = clustered_problem(260, 275, 3, 2, batch=1, heads=2, kv_heads=1)
    mask = torch.rand(1, 275) < 0.8 if is_masked else None
    method = method_of(n_levels, 30)
    cotangent = torch.randn(1, 2, 260, 2, dtype=torch.float64)

    def loss(k, v):
        out = attention(q, k, v, method=method, key_mask=mask, is_causal=is_causal, enable_gqa=True, backend=backend)
        return (out * cotangent).sum()

    k.requires_grad_()
    v.requires_grad_()
    grads = torch.autograd.grad(loss(k, v), (k, v))
    for x, grad, others in ((k, grads[0], lambda y: (y, v)), (v, grads[1], lambda y: (k, y))):
        direction, eps = torch.randn_like(x), 1e-7  # so small a step changes no choice
        with torch.no_grad():
            slope = (loss(*others(x + eps * direction)) - loss(*others(x - eps * direction))) / (2 * eps)
        torch.testing.assert_close((grad * direction).sum(), slope, rtol=1e-5, atol=1e-6)


SMALL = {
    1: Tangent(9, levels=1, cluster_size=4, n_near=3, n_far=2),
    2: Tangent(9, levels=2, cluster_size=2, n_near=3, n_far=1),
}


@pytest.mark.parametrize("n_levels", SMALL)
@masked
def test_the_reference_is_differentiable_twice(n_levels, is_masked):
    method = SMALL[n_levels]
    assert len(method.sizes(20, 12)) == n_levels
    q, *inputs = (x.requires_grad_() for x in clustered_problem(12, 20, 2, 2, batch=1, heads=1, kv_heads=1))
    mask = torch.rand(1, 20) < 0.8 if is_masked else None

    def run(k, v):  # centroids have no gradient: that of q is not the function's
        return attention(q.detach(), k, v, method=method, key_mask=mask, backend="reference")

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@fast
@pytest.mark.parametrize("method", [Tangent(30), Smyrf(2, 32)])
def test_other_backends_refuse_a_second_gradient_in_one_sentence(backend, method):
    q, k, v = (x.requires_grad_() for x in clustered_problem(200, 200, 8, 8, 1, 1, 1))
    out = attention(q, k, v, method=method, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), k, create_graph=True)
    with pytest.raises(RuntimeError, match="backend='reference'"):
        grad.sum().backward()


@pytest.fixture
def n_blocks(monkeypatch):
    """Counts the blocks into which the torch level cuts its clusters."""
    count, cut = [0], Candidates.blocks

    def counted(self, fan):
        for block in cut(self, fan):
            count[0] += 1
            yield block

    monkeypatch.setattr(Candidates, "blocks", counted)
    return count


@fast
@levelled
@masked
def test_pieces_give_the_same_as_the_whole(backend, n_levels, is_masked, monkeypatch, n_blocks):
    inputs = clustered_problem()
    mask = mask_of(is_masked, 2, 307, few=True)

    def both():
        n_blocks[0] = 0
        tensors = [x.detach().requires_grad_() for x in inputs]
        out = attention(*tensors, method=method_of(n_levels), key_mask=mask, enable_gqa=True, backend=backend)
        forward, n_blocks[0] = n_blocks[0], 0
        grads = torch.autograd.grad(out.square().sum(), tensors)
        return [out.detach(), *grads], (forward, n_blocks[0])

    whole, of_whole = both()
    monkeypatch.setattr(rows, "MAX_VECTORS", 1)
    monkeypatch.setattr(candidates, "MAX_SCORES", 900)
    monkeypatch.setattr(candidates, "MAX_GATHERED", 2000)
    monkeypatch.setattr(near, "CHUNK_ELEMENTS", 500)
    monkeypatch.setattr(gather, "CHUNK_ELEMENTS", 500)
    pieces, of_pieces = both()
    assert_close(pieces, whole)
    if backend == "torch":  # each of eight rows by itself, forward and backward
        assert min(of_pieces) >= 8 * n_levels
        assert of_whole == (n_levels, n_levels)
    else:
        assert of_pieces == (0, 0)  # the extension's level needs no blocks


@backends
@levelled
def test_it_is_deterministic_and_needs_no_seed(backend, n_levels):
    q, k, v = clustered_problem(dtype=torch.float32)
    outs = [
        attention(q, k, v, method=method_of(n_levels), enable_gqa=True, generator=seed, backend=backend)
        for seed in (None, 1, 2)
    ]
    assert all(torch.equal(outs[0], out) for out in outs)


@backends
def test_it_leaves_pytorchs_generator_alone(backend):
    q, k, v = clustered_problem()
    before = torch.get_rng_state()
    attention(q, k, v, method=method_of(1), enable_gqa=True, backend=backend)
    assert torch.equal(before, torch.get_rng_state())
    attention(q, k, v, method=method_of(1), enable_gqa=True, dropout_p=0.1, backend=backend)
    assert not torch.equal(before, torch.get_rng_state())


def test_forward_mode_is_exact_in_the_reference_and_refused_elsewhere():
    q, k, v = clustered_problem(heads=2, batch=1)
    step = torch.randn_like(k)
    run = lambda k, backend: attention(q, k, v, method=method_of(1), backend=backend)  # noqa: E731
    _, tangent = torch.func.jvp(lambda k: run(k, "reference"), (k,), (step,))
    numeric = (run(k + 1e-7 * step, "reference") - run(k - 1e-7 * step, "reference")) / 2e-7
    torch.testing.assert_close(tangent, numeric, atol=1e-6, rtol=1e-5)
    for backend in (None, *FAST):
        with pytest.raises(RuntimeError, match="pass backend='reference'"):
            torch.func.jvp(lambda k, backend=backend: run(k, backend), (k,), (step,))


@backends
@levelled
@masked
def test_a_row_does_not_depend_on_the_batch_around_it(backend, n_levels, is_masked):
    q, k, v = clustered_problem(300, 300, batch=3, dtype=torch.float32)
    mask = torch.rand(3, 300) < 0.6 if is_masked else None
    options = {"method": method_of(n_levels), "enable_gqa": True, "backend": backend}
    whole = attention(q, k, v, key_mask=mask, **options)
    for i in range(3):
        row = slice(i, i + 1)
        alone = attention(q[row], k[row], v[row], key_mask=None if mask is None else mask[row], **options)
        torch.testing.assert_close(alone, whole[row], atol=1e-6, rtol=1e-5)


@backends
@levelled
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_head(backend, n_levels, bad):
    """In a query it reaches only that query; in a key or a value, only heads that share it."""
    q, k, v = clustered_problem(batch=1)
    options = {"method": method_of(n_levels), "enable_gqa": True, "backend": backend}
    clean = attention(q, k, v, **options)
    spoiled = q.clone()
    spoiled[0, 1, 5, 2] = bad
    out = attention(spoiled, k, v, **options)
    assert out[0, 1, 5].isnan().all()
    others = torch.arange(211) != 5
    assert torch.equal(out[0, [0, 2, 3]], clean[0, [0, 2, 3]])
    assert out[0, 1, others].isfinite().all()
    for x in (k, v):
        kept = x.clone()
        x[0, 1, 7] = bad
        out = attention(q, k, v, **options)
        assert torch.equal(out[0, :2], clean[0, :2])
        assert not out[0, 2:].isfinite().all()
        x.copy_(kept)


@fast
@levelled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_the_wide_result_rounded_once(backend, n_levels, dtype):
    low = [x.to(dtype) for x in clustered_problem(dtype=torch.float32)]
    run = lambda tensors: attention(*tensors, method=method_of(n_levels), enable_gqa=True, backend=backend)  # noqa: E731
    out = run(low)
    assert out.dtype == dtype
    wide = run([x.float() for x in low])
    torch.testing.assert_close(
        out, wide.to(dtype), atol=1e-6, rtol=torch.finfo(dtype).eps
    )  # one unit, where float32 ties
    grads = output_and_gradients(lambda *x: run(x), *low)[1:]
    expected = output_and_gradients(lambda *x: run(x), *(x.float() for x in low))[1:]
    for ours, theirs in zip(grads, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.float() - theirs).norm() <= 4 * torch.finfo(dtype).eps * theirs.norm()


@fast
@settings(max_examples=40)
@given(
    n=st.integers(1, 300),
    m=st.integers(1, 300),
    d=st.integers(1, 9),
    e=st.integers(1, 9),
    budget=st.one_of(st.integers(1, 80), st.floats(0.01, 1.0)),
    n_levels=st.one_of(st.none(), st.integers(1, 4)),
    cluster_size=st.one_of(st.none(), st.integers(1, 64)),
    n_near=st.one_of(st.none(), st.integers(1, 100)),
    n_far=st.one_of(st.none(), st.integers(1, 40)),
    rank=st.integers(1, 12),
    is_causal=st.booleans(),
    share=st.sampled_from([None, 0.0, 0.03, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_constant_values_give_constant_output(
    backend, n, m, d, e, budget, n_levels, cluster_size, n_near, n_far, rank, is_causal, share, dtype, seed
):
    """Weights are non-negative and sum to one, or the query sees nothing: any shape, size, mask and dtype."""
    torch.manual_seed(seed)
    q, k = torch.randn(2, 2, n, d).to(dtype), torch.randn(2, 1, m, d).to(dtype)
    v = torch.ones(2, 1, m, e, dtype=dtype)
    mask = None if share is None else torch.rand(2, m) < share
    method = Tangent(budget, levels=n_levels, cluster_size=cluster_size, n_near=n_near, n_far=n_far, rank=rank)
    out = attention(q, k, v, method=method, key_mask=mask, is_causal=is_causal, enable_gqa=True, backend=backend)
    visible = torch.ones(2, n, m, dtype=torch.bool) if mask is None else mask[:, None].expand(2, n, m)
    if is_causal:
        visible = visible & torch.ones(n, m, dtype=torch.bool).tril()
    expected = visible.any(-1)[:, None, :, None].expand_as(out).to(dtype)
    torch.testing.assert_close(out, expected, atol=1e-2 if dtype.itemsize == 2 else 1e-4, rtol=0)
