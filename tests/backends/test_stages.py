"""Given the same inputs, the stages of every backend equal the reference's."""

from collections import Counter
from dataclasses import replace

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from problems import SEED, assert_close, clustered_problem, fast, make_call, output_and_gradients
from smyrf import Dense, Smyrf, Tangent
from smyrf.backends import find_backend
from smyrf.grouping.group import group
from smyrf.grouping.groups import FarKeys
from smyrf.grouping.hashing import draw_vectors
from smyrf.grouping.tangent import far_index
from smyrf.grouping.transforms import transform
from smyrf.methods import HASHINGS, TRANSFORMS, Level

lengths = st.one_of(st.integers(1, 60), st.sampled_from([61, 97, 113, 128]))
widths = st.integers(1, 11)
masks = st.sampled_from([None, None, "some", "few", "a whole row"])


@st.composite
def calls(draw, n=lengths, m=lengths, duplicates=False):
    """A call in float64 of any shape, with any mask; `duplicates`: of queries and keys that are often the same."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    batch, kv_heads, repeat = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    n, m, d, e = draw(n), draw(m), draw(widths), draw(widths)
    q, k, v = clustered_problem(n, m, d, e, batch, kv_heads * repeat, kv_heads)
    if duplicates:
        q, k = (x[:, :, torch.randint(max(x.shape[2] // 5, 1), (x.shape[2],))] for x in (q, k))
    kind = draw(masks)
    mask = None if kind is None else torch.rand(batch, m) < (0.1 if kind == "few" else 0.6)
    if kind == "a whole row":
        mask[0] = False
    return make_call(q, k, v, key_mask=mask, seed=torch.tensor(draw(st.integers(0, 99))))


def both(call, backend):
    """Two backends, each with the call as it prepares it."""
    return [(run, run.prepare(call)) for run in (find_backend("reference"), find_backend(backend))]


@fast
@given(call=calls())
def test_prepare_keeps_the_call(backend, call):
    prepared = find_backend(backend).prepare(call)
    expected = find_backend("reference").prepare(call)
    repeat = expected.k.shape[1] // prepared.k.shape[1]
    assert torch.equal(prepared.q, expected.q)
    visible = torch.ones_like(call.k[:, 0, :, 0], dtype=torch.bool) if call.key_mask is None else call.key_mask
    for ours, theirs in ((prepared.k, expected.k), (prepared.v, expected.v)):
        ours = ours.repeat_interleave(repeat, dim=1).transpose(1, 2)[visible]
        assert torch.equal(ours, theirs.transpose(1, 2)[visible])


def hashes_of(call, method):
    """Eqs. 4 and 14 written out: hashes of queries ``(batch, heads, H, N)`` and keys ``(batch, heads, H, M)``."""
    call = find_backend("reference").prepare(call)
    q, k = call.scale * call.q, call.k
    mask = None if call.key_mask is None else call.key_mask[:, None]
    f, g = transform(method.transform, q.square().sum(-1), k.square().sum(-1), mask)
    lifted = f.apply(q), g.apply(k)
    a = draw_vectors("projection", call.seed, lifted[0].shape[-1], method.n_hashes, 0).to(q)
    return [(x @ a.T).transpose(-1, -2) for x in lifted]


@fast
@given(call=calls(), name=st.sampled_from(TRANSFORMS))
def test_orders_by_projection_are_the_references(backend, call, name):
    """As far as float32 and the buckets of a radix sort tell hashes apart: where two nearly tie, either is first."""
    method = Smyrf(3, 8, transform=name)
    expected, found = (run.sort_by_hash(prepared, method, 6) for run, prepared in both(call, backend))
    n_valid = None if call.key_mask is None else call.key_mask.sum(-1)
    for hashes, ours, theirs, valid in zip(hashes_of(call, method), found, expected, (None, n_valid), strict=True):
        assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)  # permutations
        for row in range(len(hashes)):
            keep = slice(None if valid is None else int(valid[row]))
            sorted_hashes = [hashes[row].gather(-1, x[row].long())[..., keep] for x in (ours, theirs)]
            if sorted_hashes[0].numel():
                span = float(sorted_hashes[1].max() - sorted_hashes[1].min()) + float(hashes.abs().max())
                torch.testing.assert_close(*sorted_hashes, rtol=0.0, atol=2**-17 * span)


@fast
@given(call=calls(), name=st.sampled_from(TRANSFORMS), n_clusters=st.integers(2, 9))
def test_orders_by_bucket_are_the_references(backend, call, name, n_clusters):
    assert "cross_polytope" in HASHINGS
    method = Smyrf(3, 8, transform=name, hashing="cross_polytope")
    expected, found = (run.sort_by_hash(prepared, method, n_clusters) for run, prepared in both(call, backend))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def leaves_of(tree, call):
    """The queries of each leaf and the keys of each leaf, per row, sorted; a masked key counts as its stand-in.

    Vectors that are equal may change places: a copy of a query or key with the original, a masked key with the valid
    one in whose place it stands.
    """
    heads, n_keys = call.q.shape[1], call.n_keys
    keys = []
    for row, (order, leaf) in enumerate(zip(tree.keys, tree.leaf_of_key, strict=True)):
        stand_in = torch.arange(n_keys)
        if call.key_mask is not None:
            valid = call.key_mask[row // heads].nonzero()[:, 0]
            cycled = valid[stand_in % len(valid)] if len(valid) else torch.zeros_like(stand_in)
            stand_in = torch.where(call.key_mask[row // heads], stand_in, cycled)
        keys.append(Counter(zip(leaf.tolist(), stand_in[order.long()].tolist(), strict=True)))
    return tree.queries.sort(-1).values, keys


@fast
@given(depth=st.integers(0, 4), rank=st.integers(1, 12), data=st.data())
def test_trees_are_the_references(backend, depth, rank, data):
    """With a few queries in each leaf: a leaf of copies of one query has no direction, and any split is right."""
    call = data.draw(calls(n=st.integers(4 * 2**depth, 4 * 2**depth + 70)))
    expected, found = (run.build_tree(prepared, 2**depth, rank) for run, prepared in both(call, backend))
    assert int(found.is_copy.sum()) == int(expected.is_copy.sum())
    (queries, keys), (queries_found, keys_found) = leaves_of(expected, call), leaves_of(found, call)
    assert torch.equal(queries_found, queries)
    n_copies = -call.n_keys % 2**depth  # copies of keys are dropped, wherever they are
    assert all((a - b).total() <= n_copies for a, b in zip(keys_found, keys, strict=True))
    if call.key_mask is None and n_copies == 0:  # no two keys are equal
        assert torch.equal(found.keys, expected.keys)
        assert torch.equal(found.leaf_of_key, expected.leaf_of_key)


@fast
@given(call=calls(duplicates=True), depth=st.integers(0, 4), rank=st.integers(1, 12))
def test_trees_of_equal_vectors_are_trees(backend, call, depth, rank):
    """Where vectors tie, either side of a split is right: sizes and completeness are the reference's."""
    expected, found = (run.build_tree(prepared, 2**depth, rank) for run, prepared in both(call, backend))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
    assert torch.equal(found.keys.sort(-1).values, expected.keys.sort(-1).values)
    own, wanted = (x.queries.masked_fill(x.is_copy, -1).flatten(1).sort(-1).values for x in (found, expected))
    assert torch.equal(own, wanted)
    assert torch.equal(found.leaf_of_key.sort(-1).values, found.leaf_of_key)


@st.composite
def levels_of(draw, n_keys, depth):
    """Sizes of one to three levels, from coarse to fine, that need not come from a budget."""
    n_levels = draw(st.integers(1, min(3, depth + 1)))
    depths = sorted(draw(st.permutations(list(range(depth))))[: n_levels - 1]) if depth else []
    found, n = [], n_keys
    for one in (*depths, depth):
        kept = draw(st.integers(1, n))
        found.append(Level(2**one, 0, n, kept, draw(st.integers(1, 4))))
        n = kept
    return tuple(found)


def selection_and_gradients(run, prepared, tree, levels):
    """Near keys, and far keys, values and biases with the gradients of a weighted sum of them."""
    k, v = (x.detach().clone().requires_grad_() for x in (prepared.k, prepared.v))
    near, *far = run.select_and_fold(replace(prepared, k=k, v=v), tree, levels)
    parts = [x.masked_fill(x == -torch.inf, 0.0) for x in far]
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in parts]
    loss = sum((x * w).sum() for x, w in zip(parts, weights, strict=True)) + 0.0 * (k.sum() + v.sum())
    return near, [x.detach() for x in far], torch.autograd.grad(loss, (k, v))


@fast
@settings(max_examples=40)
@given(depth=st.integers(0, 3), data=st.data())
def test_near_and_far_keys_are_the_references(backend, depth, data):
    call = data.draw(calls(n=st.integers(4 * 2**depth, 4 * 2**depth + 40), m=st.integers(8, 90)))
    levels = data.draw(levels_of(call.n_keys, depth))
    if (
        call.key_mask is not None and len(levels) > 1
    ):  # of masked keys, which a level keeps only to fill up, any will do
        assume(int(call.key_mask.sum(-1).min()) >= max(level.n_near for level in levels[:-1]))
    tree = find_backend("reference").build_tree(find_backend("reference").prepare(call), 2**depth, 8)
    results = [selection_and_gradients(run, prepared, tree, levels) for run, prepared in both(call, backend)]
    (near, far, gradients), (near_found, far_found, gradients_found) = results
    near, near_found = (x.gather(-1, (x < 0).int().argsort(dim=-1, stable=True)) for x in (near, near_found))  # -1 last
    assert torch.equal(near_found, near)
    assert_close(far_found, far, atol=1e-10, rtol=1e-10)
    per_key_head = len(gradients[0][0]) // len(gradients_found[0][0])
    for ours, theirs in zip(gradients_found, gradients, strict=True):
        theirs = theirs.unflatten(1, (-1, per_key_head)).sum(2)  # the reference's keys are repeated
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


@fast
@given(depth=st.integers(0, 3), data=st.data())
def test_near_keys_among_equal_ones_are_as_good_as_the_references(backend, depth, data):
    """Of keys that tie any may be kept: their scores, and all mass together, are the reference's."""
    call = data.draw(calls(n=st.integers(4 * 2**depth, 4 * 2**depth + 40), m=st.integers(8, 90), duplicates=True))
    call = replace(call, v=torch.ones_like(call.v))  # values tie too
    n_near = data.draw(st.integers(1, call.n_keys))
    levels = (Level(2**depth, 0, call.n_keys, n_near, data.draw(st.integers(1, 3))),)
    tree = find_backend("reference").build_tree(find_backend("reference").prepare(call), 2**depth, 8)
    masses = []
    for run, prepared in both(call, backend):
        near, *far = run.select_and_fold(prepared, tree, levels)
        wide = find_backend("reference").prepare(call)
        k = wide.k.flatten(0, 1)
        centroids = call.scale * wide.q.flatten(0, 1)[torch.arange(len(k))[:, None, None], tree.queries].mean(2)
        scores = torch.einsum("bld,bmd->blm", centroids, k)
        picked = scores.gather(2, near.clamp(min=0).long()).masked_fill(near < 0, -torch.inf)
        keys, _, bias = FarKeys(*far, far_index(levels, k.device)).of_groups()
        at_centroid = (keys * centroids[:, :, None]).sum(-1) + bias
        total = torch.cat([picked, at_centroid], -1).logsumexp(-1)
        masses.append((picked.sort(-1).values, total, (near >= 0).sum(-1)))
    for ours, theirs in zip(masses[1], masses[0], strict=True):
        torch.testing.assert_close(ours, theirs)


@fast
@given(
    call=calls(),
    method=st.sampled_from(
        [Smyrf(2, 7), Smyrf(3, 9, deduplicate=True), Tangent(9, levels=1), Tangent(9, levels=2), Dense()]
    ),
    is_causal=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.4]),
)
def test_outputs_over_the_same_groups_are_the_references(backend, call, method, is_causal, dropout_p):
    """Outputs, log-sum-exps and gradients, over groups that the reference has made."""
    reference = find_backend("reference")
    call = replace(call, is_causal=is_causal, dropout_p=dropout_p, dropout_seed=SEED)
    groups = group(reference.prepare(call), method, reference)
    fars = [x for one in groups if one.far is not None for x in one.far[:3]]
    results = []
    for run in (reference, find_backend(backend)):
        lses = []

        def function(q, k, v, *fars):
            rest = iter(fars)
            lists = [
                one
                if one.far is None
                else replace(one, far=FarKeys(next(rest), next(rest), next(rest), one.far.of_group))
                for one in groups
            ]
            prepared = run.prepare(replace(call, q=q, k=k, v=v))  # noqa: B023
            out, lse = run.attend(prepared, lists)  # noqa: B023
            lses.append(lse)  # noqa: B023
            return out

        results.append([*output_and_gradients(function, call.q, call.k, call.v, *fars), *lses])
    assert_close(results[1], results[0], atol=1e-10, rtol=1e-10)
