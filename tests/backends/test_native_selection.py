"""Near and far keys of the extension against the definition, in float64 and cluster by cluster."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from smyrf.backends.native import extension

if extension.MISSING:  # where the package was installed without a compiler
    pytest.skip(extension.MISSING, allow_module_level=True)
from smyrf.backends.native.extension import native, running

isa = pytest.mark.parametrize("isa", extension.instruction_sets())
FLOATS = ("q", "k", "v")


@dataclass(frozen=True)
class Problem:
    """The inputs of `select_and_fold`: vectors, any tree, and the sizes (clusters, near, far) of each level."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    queries: Tensor
    order: Tensor
    leaf_of_key: Tensor
    levels: tuple[tuple[int, int, int], ...]
    scale: float = 0.3


def problem(
    n=331, width=17, value_width=5, heads=2, batch=2, kv_heads=1, levels=((8, 61, 3),), masked=False, n_queries=None
):
    """Random vectors in a random tree."""
    rows, n_leaves = batch * heads, levels[-1][0]
    n_queries = 2 * n_leaves if n_queries is None else n_queries
    leaf_size = -(-n_queries // n_leaves)
    places = torch.arange(n_leaves * leaf_size) * n_queries // (n_leaves * leaf_size)
    return Problem(
        q=2 * torch.randn(batch, heads, n_queries, width),
        k=torch.randn(batch, kv_heads, n, width),
        v=torch.randn(batch, kv_heads, n, value_width),
        key_mask=torch.rand(batch, n) > 0.3 if masked else None,
        queries=places[torch.rand(rows, len(places)).argsort(-1)].view(rows, n_leaves, leaf_size).int(),
        order=torch.rand(rows, n).argsort(-1).int(),
        leaf_of_key=(torch.arange(n) * n_leaves // n).int().expand(rows, n).contiguous(),
        levels=levels,
    )


def run(p, dtype=torch.float32):
    """The results of the extension: near keys, far keys, their values and biases, centroids, kept candidates."""
    q, k, v = (getattr(p, name).to(dtype) for name in FLOATS)
    rows, n_leaves = len(p.order), p.levels[-1][0]
    n_far = sum(clusters * far for clusters, _, far in p.levels)
    floats = {
        "far_keys": (rows, n_far, k.shape[-1]),
        "far_values": (rows, n_far, v.shape[-1]),
        "far_bias": (rows, n_far),
        "centroids": (rows, sum(clusters for clusters, _, _ in p.levels), k.shape[-1]),
    }
    results = {
        "near": torch.full((rows, n_leaves, p.levels[-1][1]), -7, dtype=torch.int32),
        **{name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in floats.items()},
        "kept": torch.full((rows, sum(clusters * near for clusters, near, _ in p.levels)), -7, dtype=torch.int32),
    }
    tree = {name: getattr(p, name) for name in ("key_mask", "queries", "order", "leaf_of_key")}
    native.select_and_fold(q=q, k=k, v=v, **tree, scale=p.scale, levels=p.levels, **results, **running())
    return results


@dataclass(frozen=True)
class Cluster:
    """One cluster of a row by the definition, in float64: its candidates, their ranks, and what the kernel found."""

    places: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    ranks: Tensor
    masked: Tensor
    centroid: Tensor
    kept: Tensor
    far: slice
    row: int
    node: int


def relative(x, valid):
    """Squared distances of vectors from the mean of the valid ones."""
    return (x - x[valid].mean(0)).square()


def each_cluster(p, results):
    """Each cluster of each level of each row, with the candidates that the level above has kept."""
    batch, kv_heads = p.k.shape[:2]
    rows = len(p.order)
    heads = rows // batch
    for row in range(rows):
        head = row % heads // (heads // kv_heads)
        index = p.order[row].long()
        k, v = (x[row // heads, head, index].double() for x in (p.k, p.v))
        valid = torch.ones(len(index), dtype=torch.bool) if p.key_mask is None else p.key_mask[row // heads, index]
        q = p.scale * p.q[row // heads, row % heads, p.queries[row].long()].double()  # (L, C, D)
        var_q = q.flatten(0, 1).var(0, unbiased=False)
        var_k = k[valid].var(0, unbiased=False)
        key_spread = ((var_q * relative(k, valid)).sum(-1) / (var_q * var_k).sum()).sqrt()
        away = relative(v, valid).sum(-1)
        weight = 0.5 * (away / away[valid].mean() + 1e-4).log()
        places = torch.arange(len(k)).expand(1, -1)  # of each cluster above
        first_far = node = first_near = 0
        for n_clusters, n_near, n_far in p.levels:
            kept = results["kept"][row, first_near : first_near + n_clusters * n_near].view(n_clusters, n_near).long()
            per_cluster = p.levels[-1][0] // n_clusters
            own_first = 2 * -(-len(k) // p.levels[-1][0]) * per_cluster <= n_near
            below = []
            for cluster in range(n_clusters):
                at = places[cluster * len(places) // n_clusters]
                its = q.view(n_clusters, -1, q.shape[-1])[cluster]
                centroid = its.mean(0)
                spread = (its.var(0, unbiased=False) * var_k).sum().sqrt()
                scores = k[at] @ centroid
                ranks = scores + 3 * spread * key_spread[at] + weight[at]
                if own_first:
                    ranks[p.leaf_of_key[row, at] // per_cluster == cluster] = torch.inf
                ranks[~valid[at]] = -torch.inf
                far = slice(first_far + cluster * n_far, first_far + (cluster + 1) * n_far)
                vectors = at, k[at], v[at], scores, ranks, ~valid[at], centroid
                yield Cluster(*vectors, kept[cluster], far, row, node + cluster)
                below.append(at[kept[cluster]])
            places = torch.stack(below)
            first_far, node, first_near = first_far + n_clusters * n_far, node + n_clusters, first_near + kept.numel()


def folded(one):
    """What a cluster's far keys stand for: the candidates of each, of which those that are kept or masked are out."""
    which = ~one.masked
    which[one.kept] = False
    n_far = one.far.stop - one.far.start
    for f in range(n_far):
        part = slice(*(i * len(which) // n_far for i in (f, f + 1)))
        yield one.far.start + f, part, which[part]


def check(p, dtype):
    results = run(p, dtype)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    same = []
    for one in each_cluster(p, results):
        torch.testing.assert_close(results["centroids"][one.row, one.node].double(), one.centroid, **tolerance)
        chosen = one.ranks.sort(descending=True, stable=True).indices[: len(one.kept)].sort().values
        assert (one.kept.diff() > 0).all()
        same.append(torch.isin(one.kept, chosen).double().mean())
        for f, part, which in folded(one):
            weights = one.scores[part][which].softmax(0)
            key, value = weights @ one.k[part][which], weights @ one.v[part][which]  # zero if nothing is folded
            bias = one.scores[part][which].logsumexp(0) - key @ one.centroid
            for name, expected in (("far_keys", key), ("far_values", value), ("far_bias", bias)):
                torch.testing.assert_close(results[name][one.row, f].double(), expected, **tolerance)
        leaf = one.node - sum(clusters for clusters, _, _ in p.levels[:-1])
        if leaf >= 0:
            keys = p.order[one.row, one.places[one.kept]].masked_fill(one.masked[one.kept], -1)
            assert torch.equal(results["near"][one.row, leaf], keys)
    # In float32, two keys that are equal but for rounding may change places.
    assert torch.stack(same).mean() > (0.998 if dtype == torch.float32 else 1 - 1e-12)


SIZES = [
    {},
    {"width": 32, "value_width": 64, "n": 1031, "kv_heads": 2, "levels": ((4, 61, 3),)},
    {"n": 2500, "width": 3, "value_width": 1, "levels": ((2, 90, 3),), "heads": 1},
    {"n": 700, "levels": ((2, 350, 4), (16, 40, 5)), "batch": 1},
    {"n": 500, "levels": ((1, 400, 1), (2, 200, 2), (8, 30, 1)), "batch": 1, "n_queries": 53},
    {"n": 300, "levels": ((128, 7, 1),), "batch": 1},
    {"n": 331, "levels": ((8, 331, 0),)},
    {"n": 40, "levels": ((8, 20, 61),)},  # more far keys than candidates
]


@isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_near_and_far_keys_are_those_of_the_definition(monkeypatch, isa, dtype, masked, sizes):
    monkeypatch.setattr(extension, "ISA", isa)
    check(problem(masked=masked, **sizes), dtype)


@isa
@pytest.mark.parametrize("n_clusters", [1, 4, 64, 128])
def test_a_sample_that_is_not_like_the_rest_does_no_harm(monkeypatch, isa, n_clusters):
    """Every sixteenth place, where the kernel looks for bounds, holds a key far better than all others."""
    monkeypatch.setattr(extension, "ISA", isa)
    p = problem(n=4096, width=7, value_width=3, heads=1, batch=1, levels=((n_clusters, 300, 8),))
    p = replace(p, q=p.q.abs() + 1)
    p.k[0, 0, p.order[0, ::16].long()] += 10
    check(p, torch.float32)


def plain(n=50, levels=((4, 10, 4),), masked=()):
    """One row of equal keys and values in their own order."""
    p = problem(n=n, width=4, value_width=2, heads=1, batch=1, levels=levels)
    mask = torch.ones(1, n, dtype=torch.bool)
    mask[:, list(masked)] = False
    order = torch.arange(n, dtype=torch.int32)[None]
    leaves = torch.full_like(p.leaf_of_key, levels[-1][0] + 1)  # of no cluster
    return replace(p, k=torch.ones_like(p.k), v=torch.ones_like(p.v), key_mask=mask, order=order, leaf_of_key=leaves)


def test_of_equal_keys_the_first_are_kept_and_masked_ones_last():
    found = run(plain(masked=range(5)))
    assert torch.equal(found["near"][0], torch.arange(5, 15).int().expand(4, 10))
    far = [found[name].unflatten(1, (4, 4)) for name in ("far_keys", "far_values", "far_bias")]
    assert torch.isneginf(far[2][:, :, 0]).all()  # 0 … 11: five are masked, the others kept
    assert all((x[:, :, 0] == 0).all() for x in far[:2])
    torch.testing.assert_close(far[1][:, :, 3], torch.ones(1, 4, 2))
    found = run(plain(masked=range(50)))
    assert (found["near"] == -1).all()
    assert torch.isneginf(found["far_bias"]).all()


def test_all_candidates_may_be_kept():
    found = run(plain(n=9, levels=((4, 9, 3),)))
    assert torch.equal(found["near"][0], torch.arange(9).int().expand(4, 9))
    assert torch.isneginf(found["far_bias"]).all()
    assert (found["far_keys"] == 0).all()
    assert (found["far_values"] == 0).all()


TWO_LEVELS = {"levels": ((2, 150, 2), (8, 61, 3))}


@isa
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("sizes", [{}, TWO_LEVELS])
def test_masked_keys_have_no_effect_whatever_they_hold(monkeypatch, isa, bad, sizes):
    monkeypatch.setattr(extension, "ISA", isa)
    p = problem(masked=True, **sizes)
    hidden = ~p.key_mask[:, None, :, None]
    dirty = replace(p, k=p.k.masked_fill(hidden, bad), v=p.v.masked_fill(hidden, bad))
    clean, found = run(p), run(dirty)
    assert all(torch.equal(clean[name], found[name]) for name in clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_are_read_where_they_are(dtype):
    """As a model leaves them, (batch, M, heads, D), and one beside the other."""
    p = problem()
    both = torch.cat([p.k, p.v], dim=-1).to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    clean, found = run(p, dtype), run(replace(p, k=both[..., :17], v=both[..., 17:]), dtype)
    assert all(torch.equal(clean[name], found[name]) for name in clean)


def test_no_rows_give_no_rows():
    assert run(problem(batch=0))["near"].shape == (0, 8, 61)


def run_backward(p, dtype, results, grads):
    """dk and dv."""
    k, v = p.k.to(dtype), p.v.to(dtype)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    saved = {name: x for name, x in results.items() if name != "near"}
    tensors = {"key_mask": p.key_mask, "order": p.order, **saved, **grads}
    native.select_and_fold_backward(k=k, v=v, levels=p.levels, **tensors, dk=dk, dv=dv, **running())
    return dk, dv


def random_grads(results):
    return {f"d_{name}": torch.randn_like(results[name]) for name in ("far_keys", "far_values", "far_bias")}


def gradients_by_definition(p, results, grads):
    """dk and dv in float64, by autograd through the definition, with the near keys of the results."""
    p = replace(p, k=p.k.double().requires_grad_(), v=p.v.double().requires_grad_())
    total = torch.zeros((), dtype=torch.float64)
    for one in each_cluster(p, results):
        for f, part, which in folded(one):
            if not which.any():
                continue
            weights = one.scores[part][which].softmax(0)
            key, value = weights @ one.k[part][which], weights @ one.v[part][which]
            bias = one.scores[part][which].logsumexp(0) - key @ one.centroid
            for name, found in (("far_keys", key), ("far_values", value), ("far_bias", bias)):
                total = total + (found * grads[f"d_{name}"][one.row, f].double()).sum()
    return torch.autograd.grad(total, (p.k, p.v))


@isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [one for one in SIZES if one.get("levels") != ((8, 331, 0),)])
def test_gradients_are_those_of_the_definition(monkeypatch, isa, dtype, masked, sizes):
    monkeypatch.setattr(extension, "ISA", isa)
    p = problem(masked=masked, **sizes)
    results = run(p, dtype)
    grads = random_grads(results)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    found, expected = run_backward(p, dtype, results, grads), gradients_by_definition(p, results, grads)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, **tolerance)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_masked_keys_have_no_effect_on_gradients_and_get_none(bad):
    p = problem(masked=True, **TWO_LEVELS)
    hidden = ~p.key_mask[:, None, :, None]
    results = run(p)
    grads = random_grads(results)
    dirty = replace(p, k=p.k.masked_fill(hidden, bad), v=p.v.masked_fill(hidden, bad))
    found = run_backward(dirty, torch.float32, results, grads)
    for ours, clean in zip(found, run_backward(p, torch.float32, results, grads), strict=True):
        assert torch.equal(ours, clean)
        assert (ours.masked_select(hidden) == 0).all()


@pytest.mark.parametrize("sizes", [{}, {"kv_heads": 2}, TWO_LEVELS])
def test_results_do_not_depend_on_the_number_of_threads(sizes):
    before, found, p = torch.get_num_threads(), [], problem(n=900, **sizes)
    grads = random_grads(run(p))
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results = run(p)
            found.append([*results.values(), *run_backward(p, torch.float32, results, grads)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", ["order", "queries"])
@pytest.mark.parametrize("wrong", [-1, 331])
def test_an_index_out_of_range_is_refused(name, wrong):
    p = problem()
    getattr(p, name).view(-1)[7] = wrong
    with pytest.raises(IndexError, match=f"the index {wrong} of {name} is out of range"):
        run(p)


def test_kept_candidates_out_of_range_are_refused():
    p = problem(**TWO_LEVELS)
    results = run(p)
    results["kept"][1, 2 * 150 + 3] = 150  # of the second level, whose clusters have 150 candidates
    with pytest.raises(IndexError, match="the index 150 of kept is out of range: there are 150"):
        run_backward(p, torch.float32, results, random_grads(results))


@pytest.mark.parametrize(
    ("levels", "says"),
    [
        (((8, 400, 3),), "n_near=400 must be at most 331"),
        (((8, 0, 3),), "n_near=0 must be at least 1"),
        (((3, 100, 1), (8, 50, 1)), "n_clusters=8 must be a multiple of 3"),
        (((8, 61, -1),), "n_far=-1 must be at least 0"),
        (((4, 61, 3),), "n_leaves=8 must be the number of clusters of the last level, 4"),
        ((), "there are no levels"),
        (((8, 61),), "a level must have three sizes"),
    ],
)
def test_levels_that_cannot_be_are_refused(levels, says):
    p = problem()
    results = run(p)
    tree = {name: getattr(p, name) for name in ("key_mask", "queries", "order", "leaf_of_key")}
    options = {**{name: getattr(p, name) for name in FLOATS}, **tree, **results, **running()}
    with pytest.raises(ValueError, match=says):
        native.select_and_fold(**options, scale=p.scale, levels=levels)


def test_results_of_another_shape_or_dtype_are_refused():
    p = problem()
    results = run(p)
    tree = {name: getattr(p, name) for name in ("key_mask", "queries", "order", "leaf_of_key")}
    options = {**{name: getattr(p, name) for name in FLOATS}, **tree, "scale": 0.3, "levels": p.levels, **running()}
    wrong = {"near": results["near"].long(), "far_keys": results["far_keys"][:, 1:], "far_bias": results["far_bias"][0]}
    for name, x in wrong.items():
        with pytest.raises((TypeError, ValueError), match=name):
            native.select_and_fold(**options, **{**results, name: x})
