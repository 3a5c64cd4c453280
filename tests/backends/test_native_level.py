"""A level of Tangent attention in the extension against the definition, in float64 and cluster by cluster."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from smyrf.backends.native import extension
from smyrf.methods import Level

if extension.MISSING:  # where the package was installed without a compiler
    pytest.skip(extension.MISSING, allow_module_level=True)
from smyrf.backends.native.level import fold_level, fold_level_backward

isa = pytest.mark.parametrize("isa", extension.instruction_sets())


@dataclass(frozen=True)
class Problem:
    """The inputs of one level: B = batch · heads rows, A = B · (clusters of a row above) parents."""

    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    order: Tensor
    leaf_of_key: Tensor
    key_spread: Tensor
    value_weight: Tensor
    candidates: Tensor | None
    centroids: Tensor
    spread: Tensor
    level: Level
    leaves_per_cluster: int


def problem(
    n=331,
    width=17,
    value_width=5,
    heads=2,
    batch=2,
    kv_heads=1,
    n_clusters=8,
    n_near=61,
    n_far=3,
    above=1,
    masked=False,
):
    """Random inputs; with `above` > 1 clusters above, their candidates are random halves of the keys."""
    rows, n_leaves = batch * heads, 2 * n_clusters
    mask = torch.rand(batch, n) > 0.3 if masked else None
    candidates = None
    if above > 1:
        drawn = torch.rand(rows * above, n).argsort(-1)[:, : n // 2]
        candidates = drawn.sort(-1).values.int()
    level = Level(n_clusters, 1, n if candidates is None else n // 2, n_near, n_far)
    return Problem(
        k=torch.randn(batch, kv_heads, n, width),
        v=torch.randn(batch, kv_heads, n, value_width),
        key_mask=mask,
        order=torch.rand(rows, n).argsort(-1).int(),
        leaf_of_key=(torch.arange(n) * n_leaves // n).int().expand(rows, n),
        key_spread=torch.rand(rows, n),
        value_weight=torch.randn(rows, n),
        candidates=candidates,
        centroids=torch.randn(rows * above, n_clusters // above, width),
        spread=torch.rand(rows * above, n_clusters // above),
        level=level,
        leaves_per_cluster=2,
    )


def run(p, dtype=torch.float32):
    """Near keys (B, L, S), far keys (B, L, F, D), far values (B, L, F, E) and biases (B, L, F)."""
    floats = {
        name: getattr(p, name).to(dtype) for name in ("k", "v", "key_spread", "value_weight", "centroids", "spread")
    }
    p, rows, level = replace(p, **floats), len(p.order), p.level
    kept = torch.full((rows, level.n_clusters, level.n_near), -7, dtype=torch.int32)
    far_keys, far_values, bias = (
        torch.full((rows, level.n_clusters * level.n_far, *tail), torch.nan, dtype=dtype)
        for tail in ((p.k.shape[-1],), (p.v.shape[-1],), ())
    )
    fold_level(*vars(p).values(), kept, far_keys, far_values, bias)
    shape = (rows, level.n_clusters, level.n_far)
    return kept, far_keys.view(*shape, p.k.shape[-1]), far_values.view(*shape, p.v.shape[-1]), bias.view(shape)


def each_cluster(p):
    """Of each row and cluster: keys, values, scores of its candidates, their ranks, which are masked, the centroid."""
    batch, kv_heads = p.k.shape[:2]
    rows, fan_out = len(p.order), p.centroids.shape[1]
    heads = rows // batch
    for row in range(rows):
        for cluster in range(p.level.n_clusters):
            parent, child = divmod(row * p.level.n_clusters + cluster, fan_out)
            places = torch.arange(p.order.shape[1]) if p.candidates is None else p.candidates[parent].long()
            index = p.order[row, places].long()
            head = row % heads // (heads // kv_heads)
            k, v = (x[row // heads, head, index].double() for x in (p.k, p.v))
            centroid = p.centroids[parent, child].double()
            masked = (
                torch.zeros(len(places), dtype=torch.bool) if p.key_mask is None else ~p.key_mask[row // heads, index]
            )
            scores = k @ centroid
            ranks = scores + 3 * p.spread[parent, child].double() * p.key_spread[row, places].double()
            ranks += p.value_weight[row, places].double()
            if p.leaves_per_cluster:
                ranks[p.leaf_of_key[row, places] // p.leaves_per_cluster == cluster] = torch.inf
            ranks[masked] = -torch.inf
            yield row, cluster, k, v, scores, ranks, masked, centroid


def check(p, dtype):
    kept, far_keys, far_values, bias = run(p, dtype)
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    same = []
    for row, cluster, k, v, scores, ranks, masked, centroid in each_cluster(p):
        chosen = ranks.sort(descending=True, stable=True).indices[: p.level.n_near].sort().values
        found = kept[row, cluster].long()
        assert (found.diff() > 0).all()
        same.append(torch.isin(found, chosen).double().mean())
        folded = ~masked
        folded[found] = False
        for f in range(p.level.n_far):
            part = slice(*(i * len(k) // p.level.n_far for i in (f, f + 1)))
            which, ours = folded[part], [x[row, cluster, f].double() for x in (far_keys, far_values, bias)]
            weights = scores[part][which].softmax(0)
            key, value = weights @ k[part][which], weights @ v[part][which]  # zero if nothing is folded
            expected = [key, value, scores[part][which].logsumexp(0) - key @ centroid]
            for a, b in zip(ours, expected, strict=True):
                torch.testing.assert_close(a, b, **tolerance)
    # In float32, two keys that are equal but for rounding may change places.
    assert torch.stack(same).mean() > (0.999 if dtype == torch.float32 else 1 - 1e-12)


@isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"width": 32, "value_width": 64, "n": 1031, "kv_heads": 2},
        {"n": 2500, "width": 3, "value_width": 1, "n_clusters": 2, "n_near": 90, "heads": 1, "kv_heads": 1},
        {"above": 2, "n": 700, "n_clusters": 16, "n_near": 40, "n_far": 5},
        {"n_clusters": 128, "n": 300, "n_near": 7, "n_far": 1, "batch": 1},
        {"n_near": 331, "n": 331, "n_far": 0},
        {"n_near": 20, "n": 40, "n_far": 61},  # more far keys than candidates
    ],
)
def test_near_and_far_keys_are_those_of_the_definition(monkeypatch, isa, dtype, masked, sizes):
    monkeypatch.setattr(extension, "ISA", isa)
    check(problem(masked=masked, **sizes), dtype)


def run_backward(p, dtype, grads, results):
    """dk and dv of a level whose results are given."""
    floats = {name: getattr(p, name).to(dtype) for name in ("k", "v", "centroids")}
    p = replace(p, **floats)
    kept, *far = results
    dk, dv = torch.zeros_like(p.k), torch.zeros_like(p.v)
    options = (p.k, p.v, p.key_mask, p.order, p.candidates, p.centroids, p.level, kept, tuple(far), tuple(grads))
    fold_level_backward(*options, dk, dv)
    return dk, dv


def gradients_by_definition(p, results, grads):
    """dk and dv in float64, by autograd through the definition, with the near keys of the results."""
    p = replace(p, k=p.k.double().requires_grad_(), v=p.v.double().requires_grad_())
    total = torch.zeros((), dtype=torch.float64)
    for row, cluster, k, v, scores, _, masked, centroid in each_cluster(p):
        folded = ~masked
        folded[results[0][row, cluster].long()] = False
        for f in range(p.level.n_far):
            part = slice(*(i * len(k) // p.level.n_far for i in (f, f + 1)))
            which = folded[part]
            if not which.any():
                continue
            weights = scores[part][which].softmax(0)
            key, value = weights @ k[part][which], weights @ v[part][which]
            bias = scores[part][which].logsumexp(0) - key @ centroid
            for found, grad in zip((key, value, bias), grads, strict=True):
                total = total + (found * grad[row, cluster, f].double()).sum()
    return torch.autograd.grad(total, (p.k, p.v))


@isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"width": 32, "value_width": 64, "n": 1031, "kv_heads": 2, "n_clusters": 4},
        {"n": 900, "width": 3, "value_width": 1, "n_clusters": 2, "n_near": 90, "heads": 1, "kv_heads": 1},
        {"above": 2, "n": 700, "n_clusters": 8, "n_near": 40, "n_far": 5, "batch": 1},
        {"n_clusters": 128, "n": 300, "n_near": 7, "n_far": 1, "batch": 1},
        {"n_near": 20, "n": 40, "n_far": 61},
    ],
)
def test_gradients_are_those_of_the_definition(monkeypatch, isa, dtype, masked, sizes):
    monkeypatch.setattr(extension, "ISA", isa)
    p = problem(masked=masked, **sizes)
    results = run(p, dtype)
    grads = [torch.randn_like(x) for x in results[1:]]
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    for ours, theirs in zip(
        run_backward(p, dtype, grads, results), gradients_by_definition(p, results, grads), strict=True
    ):
        torch.testing.assert_close(ours.double(), theirs, **tolerance)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_masked_keys_have_no_effect_on_gradients_and_get_none(bad):
    p = problem(masked=True, above=2)
    hidden = ~p.key_mask[:, None, :, None]
    results = run(p)
    grads = [torch.randn_like(x) for x in results[1:]]
    dirty = replace(p, k=p.k.masked_fill(hidden, bad), v=p.v.masked_fill(hidden, bad))
    found = run_backward(dirty, torch.float32, grads, results)
    for ours, clean in zip(found, run_backward(p, torch.float32, grads, results), strict=True):
        assert torch.equal(ours, clean)
        assert (ours.masked_select(hidden) == 0).all()


@pytest.mark.parametrize("sizes", [{}, {"kv_heads": 2}, {"above": 2}])
def test_gradients_do_not_depend_on_the_number_of_threads(sizes):
    before, found, p = torch.get_num_threads(), [], problem(n=900, **sizes)
    results = run(p)
    grads = [torch.randn_like(x) for x in results[1:]]
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(run_backward(p, torch.float32, grads, results))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_own_keys_come_first_only_if_asked():
    check(replace(problem(masked=True), leaves_per_cluster=0), torch.float64)


@isa
@pytest.mark.parametrize("n_clusters", [1, 4, 64, 128])
def test_a_sample_that_is_not_like_the_rest_does_no_harm(monkeypatch, isa, n_clusters):
    """Every sixteenth place, where the kernel looks for bounds, holds a key far better than all others."""
    monkeypatch.setattr(extension, "ISA", isa)
    p = problem(
        n=4096, width=7, value_width=3, heads=1, batch=1, kv_heads=1, n_clusters=n_clusters, n_near=300, n_far=8
    )
    p = replace(p, centroids=p.centroids.abs() + 1, leaves_per_cluster=0, value_weight=torch.zeros(1, 4096))
    p.k[0, 0, p.order[0, ::16].long()] += 10
    check(p, torch.float32)


def plain(n=50, n_clusters=4, n_near=10, n_far=4, masked=()):
    """One row of equal keys in their own order, and no difference between them."""
    p = problem(
        n=n, width=4, value_width=2, heads=1, batch=1, kv_heads=1, n_clusters=n_clusters, n_near=n_near, n_far=n_far
    )
    mask = torch.ones(1, n, dtype=torch.bool)
    mask[:, list(masked)] = False
    zeros, order = torch.zeros(1, n), torch.arange(n, dtype=torch.int32)[None]
    same = {"k": torch.ones_like(p.k), "order": order, "key_spread": zeros, "value_weight": zeros}
    return replace(p, key_mask=mask, leaves_per_cluster=0, **same)


def test_of_equal_keys_the_first_are_kept_and_masked_ones_last():
    p = plain(masked=range(5))
    kept, far_keys, far_values, bias = run(p)
    assert torch.equal(kept[0], torch.arange(5, 15).int().expand(4, 10))
    assert torch.isneginf(bias[:, :, 0]).all()  # 0 … 11: five are masked, the others kept
    assert (far_keys[:, :, 0] == 0).all()
    assert (far_values[:, :, 0] == 0).all()
    torch.testing.assert_close(far_values[0, 0, 3], p.v[0, 0, 37:].mean(0))
    kept, _, _, bias = run(plain(masked=range(50)))
    assert torch.equal(kept[0], torch.arange(10).int().expand(4, 10))
    assert torch.isneginf(bias).all()


def test_all_candidates_may_be_kept():
    kept, far_keys, far_values, bias = run(plain(n=9, n_near=9, n_far=3))
    assert torch.equal(kept[0], torch.arange(9).int().expand(4, 9))
    assert torch.isneginf(bias).all()
    assert (far_keys == 0).all()
    assert (far_values == 0).all()


@isa
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("above", [1, 2])
def test_masked_keys_have_no_effect_whatever_they_hold(monkeypatch, isa, bad, above):
    monkeypatch.setattr(extension, "ISA", isa)
    p = problem(masked=True, above=above)
    hidden = ~p.key_mask[:, None, :, None]
    dirty = replace(p, k=p.k.masked_fill(hidden, bad), v=p.v.masked_fill(hidden, bad))
    for a, b in zip(run(p), run(dirty), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keys_are_read_where_they_are(dtype):
    """As a model leaves them, (batch, M, heads, D), and one beside the other."""
    p = problem()
    k, v = p.k.to(dtype), p.v.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    both = torch.cat([k, v], dim=-1).transpose(1, 2).contiguous().transpose(1, 2)
    strided = replace(p, k=both[..., :17], v=both[..., 17:])
    for a, b in zip(run(replace(p, k=k, v=v), wide), run(strided, wide), strict=True):
        assert torch.equal(a, b)


def test_results_are_written_into_slices_of_larger_tensors():
    p = problem()
    rows, n_far = len(p.order), p.level.n_clusters * p.level.n_far
    kept = torch.full((rows, 3 + p.level.n_clusters * p.level.n_near), -7, dtype=torch.int32)
    tables = [torch.full((rows, 2 + n_far + 5, *tail), -7.0) for tail in ((17,), (5,), ())]
    fold_level(*vars(p).values(), kept[:, 3:], *(x[:, 2 : 2 + n_far] for x in tables))
    assert (kept[:, :3] == -7).all()
    assert torch.equal(kept[:, 3:].reshape(rows, p.level.n_clusters, -1), run(p)[0])
    for table, expected in zip(tables, run(p)[1:], strict=True):
        assert (table[:, :2] == -7).all()
        assert (table[:, 2 + n_far :] == -7).all()
        assert torch.equal(table[:, 2 : 2 + n_far].reshape(expected.shape), expected)


def test_results_do_not_depend_on_the_number_of_threads():
    before, found, p = torch.get_num_threads(), [], problem(n_clusters=128, masked=True)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(run(p))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_no_rows_give_no_rows():
    p = problem(batch=0)
    assert run(p)[0].shape == (0, 8, 61)


@pytest.mark.parametrize("name", ["order", "candidates"])
@pytest.mark.parametrize("wrong", [-1, 331, 2**32 + 3])
def test_an_index_out_of_range_is_refused(name, wrong):
    p = problem(above=2)
    bad = getattr(p, name).long()
    bad[1, 5] = wrong
    with pytest.raises(IndexError, match=f"{wrong} of {name} is out of range"):
        run(replace(p, **{name: bad}))


def test_results_of_another_size_or_dtype_are_refused():
    p = problem()
    kept = torch.empty(4, 8, 61, dtype=torch.int32)
    out = [torch.empty(4, 24, 17), torch.empty(4, 24, 5), torch.empty(4, 24)]
    with pytest.raises(ValueError, match=r"kept_out has 1952 elements of torch\.int64"):
        fold_level(*vars(p).values(), kept.long(), *out)
    with pytest.raises(ValueError, match=r"far_keys_out has 1428 elements of .*, but needs 1632"):
        fold_level(*vars(p).values(), kept, out[0][:, 3:], *out[1:])
    with pytest.raises(ValueError, match="bias_out"):
        fold_level(*vars(p).values(), kept, *out[:2], out[2].double())
    with pytest.raises(ValueError, match="n_candidates=331 must be at least 400"):
        run(replace(p, level=p.level._replace(n_near=400)))
