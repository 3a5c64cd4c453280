"""Tangent attention: what it promises beyond what all methods promise (tests/test_attention_*.py)."""

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from smyrf import Dense, Tangent, attention
from smyrf.backends import BACKENDS, attend
from smyrf.backends.torch.workspace import workspace
from smyrf.grouping.tangent import candidates, far, levels, near, tree
from smyrf.tools.analysis.error import output_errors

CPU = torch.device("cpu")
levelled = pytest.mark.parametrize("n_levels", [1, 2, 3])
fast = pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])


def method_of(n_levels, budget=40, **sizes):
    return Tangent(budget, levels=n_levels, **sizes)


def problem(n=211, m=307, d=13, e=17, batch=2, heads=4, kv_heads=2, dtype=torch.float64):
    """Queries and keys with some structure, so that there is something to cluster."""
    centres = torch.randn(6, d, dtype=dtype)
    q = centres[torch.randint(6, (batch, heads, n))] + 0.5 * torch.randn(batch, heads, n, d, dtype=dtype)
    k = centres[torch.randint(6, (batch, kv_heads, m))] + 0.5 * torch.randn(batch, kv_heads, m, d, dtype=dtype)
    return q, k, torch.randn(batch, kv_heads, m, e, dtype=dtype)


# --- the far field ------------------------------------------------------------------------------------


@given(n=st.integers(1, 40), n_far=st.integers(1, 9), seed=st.integers(0, 999))
def test_a_far_key_is_the_tangent_of_its_groups_mass(n, n_far, seed):
    """At the centroid it has the group's weight and mean value, and nowhere more weight than the group."""
    torch.manual_seed(seed)
    k, v, centroid = torch.randn(1, n, 5), torch.randn(1, n, 3), torch.randn(1, 2, 5)
    hidden = torch.rand(1, 2, n) < 0.3
    scores = (centroid @ k.transpose(1, 2)).masked_fill(hidden, -torch.inf)
    found, biases = far.fold(scores.clone(), torch.cat([k, v], -1), centroid, n_far)
    q = torch.randn(2, 50, 5)
    for cluster in range(2):
        for i, run in far.runs(n, n_far):
            far_key, far_value = found[0, cluster, i].split([5, 3])
            bias, here = biases[0, cluster, i], ~hidden[0, cluster, run]
            if not here.any():
                assert bias == -torch.inf
                assert (far_key == 0).all()
                continue
            keys, values = k[0, run][here], v[0, run][here]
            mass = (keys @ centroid[0, cluster]).logsumexp(0)
            torch.testing.assert_close(far_key @ centroid[0, cluster] + bias, mass)
            mean = (keys @ centroid[0, cluster]).softmax(0) @ values
            torch.testing.assert_close(far_value, mean, atol=1e-5, rtol=1e-5)
            ours = q[cluster] @ far_key + bias
            assert (ours <= (q[cluster] @ keys.T).logsumexp(-1) + 1e-4).all()


def test_folding_has_the_gradients_of_its_formula():
    k, v, centroid = (torch.randn(2, n, w, dtype=torch.float64) for n, w in ((23, 5), (23, 3), (4, 5)))
    hidden = torch.rand(2, 4, 23) < 0.3
    k.requires_grad_()
    v.requires_grad_()

    def formula():
        scores = (centroid @ k.transpose(1, 2)).masked_fill(hidden, -torch.inf)
        keys, values, bias = [], [], []
        for _, run in far.runs(23, 3):
            weights = scores[..., run].softmax(-1)
            keys.append(weights @ k[:, run])
            values.append(weights @ v[:, run])
            bias.append(scores[..., run].logsumexp(-1) - (keys[-1] * centroid).sum(-1))
        return torch.cat([torch.stack(keys, 2), torch.stack(values, 2)], -1), torch.stack(bias, 2)

    expected = formula()
    grads = [torch.randn_like(x) for x in expected]
    wanted = torch.autograd.grad(expected, (k, v), grads)
    with torch.no_grad():
        vectors = torch.cat([k, v], -1)
        scores = (centroid @ k.transpose(1, 2)).masked_fill(hidden, -torch.inf)
        found = far.fold(scores.clone(), vectors, centroid, 3)
        into = torch.zeros_like(vectors)
        far.fold_backward(scores, vectors, centroid, *found, *grads, into)
    for ours, theirs in zip((*found, into), (*expected, torch.cat(wanted, -1)), strict=True):
        torch.testing.assert_close(ours, theirs)


# --- the tree -----------------------------------------------------------------------------------------


@given(n=st.integers(1, 200), m=st.integers(1, 200), depth=st.integers(0, 6), masked=st.booleans())
def test_every_query_and_key_has_one_place_in_the_tree(n, m, depth, masked):
    q, k = torch.randn(2, n, 6), torch.randn(2, m, 6)
    mask = torch.rand(2, m) < 0.5 if masked else None
    queries, copies, keys, leaves = tree.tree_orders(q, k, mask, 2**depth, 4)
    for row in range(2):
        assert sorted(queries[row][~copies[row]].tolist()) == list(range(n))
        assert sorted(keys[row].tolist()) == list(range(m))
    size = -(-m // 2**depth)
    assert (leaves.diff(dim=1) >= 0).all()
    assert all(leaves[0].eq(leaf).sum() <= size for leaf in range(2**depth))


def test_the_tree_puts_together_what_weighs_keys_alike():
    """Queries of eight distant kinds end up in eight leaves, each with the keys of its kind."""
    centres = 10 * torch.randn(8, 16)
    kind = torch.arange(256) % 8
    q = centres[kind] + 0.1 * torch.randn(1, 256, 16)
    k = centres[kind.flip(0)] + 0.1 * torch.randn(1, 256, 16)
    queries, _, keys, _ = tree.tree_orders(q, k, None, 8, 8)
    of_queries, of_keys = kind[queries[0]].view(8, 32), kind.flip(0)[keys[0]].view(8, 32)
    assert torch.equal(of_queries, of_queries[:, :1].expand(8, 32))
    assert torch.equal(of_keys, of_queries)


def test_masked_keys_are_spread_over_all_branches():
    q, k = torch.randn(1, 512, 8), torch.randn(1, 512, 8)
    mask = (torch.arange(512) < 64)[None]
    _, _, keys, leaves = tree.tree_orders(q, k, mask, 8, 8)
    valid = mask[0][keys[0]]
    counts = torch.stack([valid[leaves[0] == leaf].sum() for leaf in range(8)])
    assert counts.min() >= 4  # 8 each, if the split were perfect


@pytest.mark.parametrize(
    "values", [torch.zeros(1, 64, 4), torch.full((1, 64, 4), 3e37), torch.eye(4).repeat(16, 1)[None]]
)
def test_degenerate_vectors_have_a_tree_too(values):
    queries, _, keys, _ = tree.tree_orders(values, values, None, 8, 4)
    assert sorted(queries[0].tolist()) == sorted(keys[0].tolist()) == list(range(64))


@pytest.mark.parametrize("n_different", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("d", [16, 64, 128])
def test_few_different_keys_are_no_problem(n_different, d):
    """As in a blank image, or with padding that is not masked: covariances without full rank."""
    q, k, v = torch.randn(3, 1, 2, 512, d).unbind()
    k[:, 0, n_different:] = k[:, 0, :1]  # the other head is as it was
    out = attention(q, k, v, method=Tangent(64))
    assert out.isfinite().all()
    assert torch.equal(out[:, 1:], attention(q[:, 1:], k[:, 1:], v[:, 1:], method=Tangent(64)))


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


# --- which keys are kept ------------------------------------------------------------------------------


def test_choose_finds_the_largest_in_ascending_places():
    scores = torch.randn(3, 5, 50)
    chosen = near.choose(scores, 7)
    assert torch.equal(chosen, scores.topk(7).indices.sort(-1).values)
    assert torch.equal(near.choose(scores, 50)[0, 0], torch.arange(50))


def test_a_key_is_ranked_by_what_it_may_do_to_the_output():
    spread, of_key, weight = torch.tensor([[[0.5], [2.0]]]), torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[0.0, -1.0]]])
    with workspace(CPU) as scratch:
        found = near.score(torch.tensor([[[1.0, 0.0], [0.0, -torch.inf]]]), spread, of_key, weight, scratch)
    torch.testing.assert_close(found, torch.tensor([[[2.5, 3.5], [6.0, -torch.inf]]]))


def test_spread_and_weight_are_what_their_formulas_say():
    k, v, variance = torch.randn(2, 40, 5), torch.randn(2, 40, 3), torch.rand(2, 5)
    mask = torch.rand(2, 40) < 0.6
    k, v = k * mask[..., None], v * mask[..., None]
    with workspace(CPU) as scratch:
        spread, key_variance = near.key_spread(k, variance, mask, scratch)
        weight = near.value_weight(v, mask, scratch)
    for row in range(2):
        valid_k, valid_v = k[row][mask[row]], v[row][mask[row]]
        sigma_sq = ((valid_k - valid_k.mean(0)).square() * variance[row]).sum(-1)
        torch.testing.assert_close(spread[row][mask[row]], (sigma_sq / sigma_sq.mean()).sqrt())
        torch.testing.assert_close(key_variance[row], valid_k.var(0, correction=0))
        away = (valid_v - valid_v.mean(0)).square().sum(-1)
        torch.testing.assert_close(weight[row][mask[row]], 0.5 * (away / away.mean() + 1e-4).log())


def test_own_keys_come_first_unless_masked():
    scores = torch.tensor([[[1.0, 2.0, -torch.inf], [3.0, 4.0, 5.0]]])
    near.prefer_own(scores, torch.tensor([[[0, 7, 0]]]))
    assert scores[0, 0].tolist() == [torch.inf, 2.0, -torch.inf]
    assert scores[0, 1].tolist() == [3.0, 4.0, 5.0]


# --- all together -------------------------------------------------------------------------------------


@levelled
def test_the_list_is_what_the_sizes_say(n_levels):
    q, k, v = problem(512, 512)
    method = method_of(n_levels)
    (groups,) = levels.tangent_groups(q, k, v, method, scale=0.3)
    sizes = method.sizes(512)
    assert len(sizes) == n_levels
    assert groups.shape == (8, sizes[-1].n_clusters, sizes[-1].cluster_size, sizes[-1].n_near)
    assert groups.extra.bias.shape[-1] == sum(level.n_far for level in sizes)


@fast
@levelled
@pytest.mark.parametrize("masked", [False, True])
def test_every_key_counts_once_at_the_centroid(backend, n_levels, masked):
    """With one query per cluster, at all levels, near keys and far keys have all the mass: the output is exact."""
    q, k, v = problem(64, 300, heads=4, kv_heads=4)
    mask = torch.rand(2, 300) < 0.7 if masked else None
    kept = [300, 120, 60, 20][-n_levels:]
    sizes = [levels.Level(64, 1, n, s, 2) for n, s in zip([300, *kept[:-1]], kept, strict=True)]
    out = run(q, k, v, sizes, mask, backend)
    expected = oracle.dense(q, k, v, 0.3, None if mask is None else mask[:, None, None].expand(2, 4, 64, 300))
    torch.testing.assert_close(out, expected)


def run(q, k, v, sizes, mask=None, backend=None):
    """Attention with the given sizes, whatever a budget would make of them."""
    flat = [size for level in sizes for size in level]
    *extra, queries, keys, _, _, _ = levels._tangent(q.detach(), k, v, mask, 0.3, flat, 8)
    groups = levels.Groups(queries, keys, extra=levels.Extra(*extra))
    return attend(q, k, v, [groups], scale=0.3, backend=backend)[0]


@fast
@levelled
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_keys_and_values_are_those_of_the_function(backend, n_levels, masked, is_causal):
    """Against numerical derivatives in float64: through near keys, far keys, their weights and biases."""
    q, k, v = problem(260, 275, 3, 2, batch=1, heads=2, kv_heads=1)
    mask = torch.rand(1, 275) < 0.8 if masked else None
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


@levelled
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_all_backends_agree_with_gradients(n_levels, dropout_p):
    q, k, v = problem()
    for x in (q, k, v):
        x.requires_grad_()
    results = []
    for backend in BACKENDS:
        out = attention(
            q, k, v, method=method_of(n_levels), dropout_p=dropout_p, enable_gqa=True, generator=3, backend=backend
        )
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for others in results[1:]:
        for a, b in zip(others, results[0], strict=True):
            torch.testing.assert_close(a, b)


@levelled
def test_pieces_give_the_same_as_the_whole(n_levels, monkeypatch):
    q, k, v = problem()
    k.requires_grad_()
    v.requires_grad_()

    def both():
        out = attention(q, k, v, method=method_of(n_levels), enable_gqa=True)
        return out, *torch.autograd.grad(out.square().sum(), (k, v))

    whole = both()
    monkeypatch.setattr(levels, "MAX_VECTORS", 1)
    monkeypatch.setattr(candidates, "MAX_SCORES", 900)
    monkeypatch.setattr(candidates, "MAX_GATHERED", 2000)
    for a, b in zip(whole, both(), strict=True):
        torch.testing.assert_close(a, b)


def test_pytorch_accepts_the_operator():
    """Schema, fake implementation and autograd registration, by PyTorch's own checker."""
    q, k, v = (x.requires_grad_() for x in problem(64, 70, batch=1))
    sizes = [size for level in method_of(2, 20).sizes(70, 64) for size in level]
    torch.library.opcheck(levels._tangent, (q.detach(), k, v, torch.rand(1, 70) < 0.8, 0.3, sizes, 8))


@fast
@levelled
def test_it_is_deterministic_and_needs_no_seed(backend, n_levels):
    q, k, v = problem(dtype=torch.float32)
    outs = [
        attention(q, k, v, method=method_of(n_levels), enable_gqa=True, generator=seed, backend=backend)
        for seed in (None, 1, 2)
    ]
    assert all(torch.equal(outs[0], out) for out in outs)


def test_it_leaves_pytorchs_generator_alone():
    q, k, v = problem()
    before = torch.get_rng_state()
    attention(q, k, v, method=method_of(1), enable_gqa=True)
    assert torch.equal(before, torch.get_rng_state())
    attention(q, k, v, method=method_of(1), enable_gqa=True, dropout_p=0.1)
    assert not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_mode_is_refused(backend):
    q, k, v = problem(heads=2)
    run = lambda k: attention(q, k, v, method=method_of(1), backend=backend)  # noqa: E731
    with pytest.raises(RuntimeError, match="forward-mode derivatives are not defined"):
        torch.func.jvp(run, (k,), (torch.ones_like(k),))


@fast
@levelled
@pytest.mark.parametrize("masked", [False, True])
def test_a_row_does_not_depend_on_the_batch_around_it(backend, n_levels, masked):
    q, k, v = problem(300, 300, batch=5, dtype=torch.float32)
    mask = torch.rand(5, 300) < 0.6 if masked else None
    method = method_of(n_levels)
    whole = attention(q, k, v, method=method, key_mask=mask, enable_gqa=True, backend=backend)
    for i in range(5):
        row = slice(i, i + 1)
        alone = attention(
            q[row],
            k[row],
            v[row],
            method=method,
            key_mask=None if mask is None else mask[row],
            enable_gqa=True,
            backend=backend,
        )
        torch.testing.assert_close(alone, whole[row], atol=1e-6, rtol=1e-5)


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


# --- quality ------------------------------------------------------------------------------------------


def hard_inputs(n=1024, d=32):
    """Those of the benchmark, on synthetic vectors."""
    spec = importlib.util.spec_from_file_location("stress", Path(__file__).parents[2] / "benchmarks" / "stress.py")
    stress = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stress)
    torch.manual_seed(1)
    centres = torch.randn(24, d)
    q = 2 * centres[torch.randint(24, (1, 2, n))] + 0.5 * torch.randn(1, 2, n, d)
    k = centres[torch.randint(24, (1, 2, n))] + 0.3 * torch.randn(1, 2, n, d)
    cases = {name: inputs for name, *inputs in stress.cases(d**-0.5 * q, k, torch.randn(1, 2, n, d))}
    return stress.errors, cases


errors, HARD = hard_inputs()


@pytest.mark.parametrize("name", HARD)
def test_never_worse_than_smyrf_at_equal_key_visits(name):
    """And finite, and within the budget: `errors` checks both."""
    found = errors(*HARD[name], budget=128)
    assert found["tangent"] <= found["smyrf"] + 1e-6
    assert found["tangent, 2 levels"] <= found["smyrf"] + 1e-6


def test_masks_lower_the_error():
    for method in ("tangent", "tangent, 2 levels"):
        whole, half, most, almost_all = (
            errors(*HARD[name], budget=128)[method]
            for name in ("as they are", *(f"{share}% of the keys masked" for share in (50, 90, 99)))
        )
        assert almost_all < 1e-5
        assert most < half < whole


def test_error_on_minilm(minilm):
    """The figures that the documentation states, on other text than it states them for."""
    for method, bound in (
        (Tangent(128, levels=1), 0.11),
        (Tangent(256, levels=1), 0.037),
        (Tangent(128, levels=2), 0.08),
        (Tangent(256, levels=2), 0.03),
    ):
        errors = output_errors(minilm, method)
        assert method.key_visits(512) <= method.budget
        assert sum(errors) / len(errors) <= bound, method
