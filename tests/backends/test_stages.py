"""The named backend runs every stage of a call, and no other does; given the same inputs, its stages equal the
reference's.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import smyrf
from problems import SEED, assert_close, backends, clustered_problem, fast, make_call, output_and_gradients
from smyrf import Dense, PerHead, Smyrf, Tangent, attention
from smyrf.backends import BACKENDS, find_backend
from smyrf.backends.native import extension
from smyrf.backends.registry import attend
from smyrf.call import Call
from smyrf.grouping.group import group
from smyrf.grouping.groups import FarKeys, Groups
from smyrf.grouping.hashing import draw_vectors
from smyrf.grouping.tangent import far_index
from smyrf.grouping.transforms import transform
from smyrf.methods import HASHINGS, TRANSFORMS, Level

STAGES = ("prepare", "sort_by_hash", "build_tree", "select_and_fold", "attend")
WHOLE = "attend_tangent"  # the last three at once, in a backend that has it

# --- which backend runs ---------------------------------------------------------------------------------


@backends
def test_a_stage_is_the_backends_own_unless_it_is_listed_as_borrowed(backend):
    record = BACKENDS[backend]
    assert record.name == backend
    for stage in STAGES:
        owner = record.borrowed.get(stage, backend)
        assert getattr(record, stage).__module__.startswith(f"smyrf.backends.{owner}."), stage


def test_only_native_borrows_and_says_so():
    assert not BACKENDS["reference"].borrowed
    assert not BACKENDS["torch"].borrowed
    for name, record in BACKENDS.items():
        for stage, owner in record.borrowed.items():
            assert owner in BACKENDS
            assert f"{stage} from {owner}" in smyrf.backends()[name]


class Operators(TorchDispatchMode):
    """Records the custom operators that run, forward and backward."""

    def __init__(self):
        super().__init__()
        self.ran = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "smyrf":
            self.ran.add(func._schema.name.removeprefix("smyrf::"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def stages(monkeypatch):
    """Records each stage that runs, as ``backend.stage``."""
    ran = set()

    def recorder(name, stage, function):
        def run(*args):
            ran.add(f"{name}.{stage}")
            return function(*args)

        return run

    for name, record in list(BACKENDS.items()):
        own = [*STAGES, WHOLE] if record.attend_tangent is not None else STAGES
        wrapped = {stage: recorder(name, stage, getattr(record, stage)) for stage in own}
        monkeypatch.setitem(BACKENDS, name, replace(record, **wrapped))
    return ran


@pytest.fixture
def extension_calls(monkeypatch):
    """Records each function of the extension that is called."""
    called = set()
    if extension.MISSING:
        return called

    def recorder(name, function):
        def run(*args, **kwargs):
            called.add(name)
            return function(*args, **kwargs)

        return run

    for name in dir(extension.native):
        function = getattr(extension.native, name)
        if not name.startswith("_") and callable(function) and not isinstance(function, type):
            monkeypatch.setattr(extension.native, name, recorder(name, function))
    return called


SMYRF, TANGENT = ("prepare", "sort_by_hash", "attend"), ("prepare", "build_tree", "select_and_fold", "attend")
CALLS = {
    "smyrf": (Smyrf(2, 32), {}, SMYRF),
    "smyrf, pairs once": (Smyrf(2, 32, deduplicate=True), {}, SMYRF),
    "smyrf, masked": (Smyrf(2, 32), {"masked": True}, SMYRF),
    "smyrf, causal": (Smyrf(2, 32), {"is_causal": True}, SMYRF),
    "smyrf, one cluster": (Smyrf(2, 300), {}, ("prepare", "attend")),
    "tangent": (Tangent(60), {}, TANGENT),
    "tangent, two levels": (Tangent(60, levels=2), {}, TANGENT),
    "tangent, masked": (Tangent(60), {"masked": True}, TANGENT),
    "tangent, causal": (Tangent(40), {"is_causal": True}, TANGENT),
    "tangent, causal and masked": (Tangent(40), {"is_causal": True, "masked": True}, TANGENT),
    "dense": (Dense(), {}, ("prepare", "attend")),
    "per head": (PerHead((Smyrf(2, 32), Tangent(60))), {}, SMYRF + TANGENT),
}
# Custom operators by backend. The reference has none.
OPERATORS = {
    "reference": {},
    "torch": {
        "sort_by_hash": {"sort_by_hash"},
        "build_tree": {"build_tree"},
        "select_and_fold": {"select_and_fold", "select_and_fold_backward"},
        "attend": {"attend", "attend_backward"},
    },
    "native": {
        "sort_by_hash": {"sort_by_hash_native"},
        "build_tree": {"build_tree_native"},
        "select_and_fold": {"select_and_fold_native", "select_and_fold_native_backward"},
        "attend": {"attend_native", "attend_native_backward"},
        WHOLE: {"attend_tangent_native", "attend_tangent_native_backward"},
    },
}


def plain_stages(backend, stages):
    """The stages of a plain call, where a backend may have those of Tangent in one operator."""
    if BACKENDS[backend].attend_tangent is None or "build_tree" not in stages:
        return stages
    return ("prepare", WHOLE, *(SMYRF if "sort_by_hash" in stages else ()))


@backends
@pytest.mark.parametrize("name", CALLS)
def test_the_named_backend_and_no_other_runs_every_stage(backend, name, stages, extension_calls):
    method, options, expected = CALLS[name]
    expected = expected if options.get("is_causal") else plain_stages(backend, expected)
    options = dict(options)
    q, k, v = (x.requires_grad_() for x in clustered_problem(300, 290, 8, 8, 1, 2, 2, torch.float32))
    mask = torch.rand(1, 290) < 0.8 if options.pop("masked", False) else None
    with Operators() as operators:
        out = attention(q, k, v, method=method, key_mask=mask, backend=backend, **options)
        in_forward = set(extension_calls)
        extension_calls.clear()
        out.sum().backward()
    assert stages == {f"{backend}.{stage}" for stage in expected}
    assert operators.ran == set().union(*(OPERATORS[backend].get(stage, set()) for stage in expected))
    assert bool(in_forward) == bool(extension_calls) == (backend == "native")


@backends
@pytest.mark.parametrize("n_levels", [1, 2])
@pytest.mark.parametrize("options", [{}, {"masked": True}, {"dropout_p": 0.3}], ids=["plain", "masked", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_stages_at_once_give_what_they_give_one_after_the_other(backend, n_levels, options, dtype):
    run, method = find_backend(backend), Tangent(60, levels=n_levels)
    if run.attend_tangent is None:
        return
    q, k, v = clustered_problem(300, 290, 8, 12, 2, 4, 2, dtype)
    mask = torch.rand(2, 290) < 0.8 if options.get("masked") else None
    leaves = [x.requires_grad_() for x in (q, k, v)]
    call = Call(q, k, v, 0.3, mask, False, options.get("dropout_p", 0.0), dropout_seed=SEED)
    prepared, layout = run.prepare(call), call.plan(method)
    whole = run.attend_tangent(prepared, method, layout).to(dtype)
    one_by_one = run.attend(prepared, group(prepared, method, run, layout))[0].to(dtype)
    assert torch.equal(whole, one_by_one)
    weight = torch.randn_like(whole)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}  # rounded once, not twice
    for ours, theirs in zip(*(torch.autograd.grad(out, leaves, weight) for out in (whole, one_by_one)), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", CALLS)
def test_reference_and_torch_run_without_the_extension(backend, name, monkeypatch):
    """Every function of the extension raises."""
    if not extension.MISSING:
        for function in [x for x in dir(extension.native) if not x.startswith("_")]:
            monkeypatch.setattr(extension.native, function, None)
    method, options, _ = CALLS[name]
    options = dict(options)
    q, k, v = (x.requires_grad_() for x in clustered_problem(300, 290, 8, 8, 1, 2, 2, torch.float32))
    mask = torch.rand(1, 290) < 0.8 if options.pop("masked", False) else None
    attention(q, k, v, method=method, key_mask=mask, backend=backend, **options).sum().backward()
    assert q.grad.isfinite().all()


@backends
def test_the_backend_of_attend_is_the_named_one(backend, stages):
    q, k, v = clustered_problem(30, 30, 5, 5, 1, 1, 1)
    index = torch.arange(30).view(1, 3, 10)
    attend(make_call(q, k, v), [Groups(index, index)], backend)
    assert stages == {f"{backend}.prepare", f"{backend}.attend"}


@backends
@pytest.mark.parametrize(("method", "expected"), [(Smyrf(2, 32), SMYRF), (Tangent(60), TANGENT)])
def test_modules_run_on_the_named_backend(backend, method, expected, stages):
    q, k, v = clustered_problem(300, 290, 8, 8, 1, 2, 2, torch.float32)
    expected = plain_stages(backend, expected)
    layer = smyrf.nn.SmyrfAttention(method, backend=backend)
    layer(q.requires_grad_(), k, v).sum().backward()
    assert stages == {f"{backend}.{stage}" for stage in expected}
    stages.clear()
    x = torch.randn(1, 300, 16, requires_grad=True)
    layer = smyrf.nn.MultiheadAttention(16, 2, batch_first=True, method=method, backend=backend)
    layer(x, x, x)[0].sum().backward()
    assert stages == {f"{backend}.{stage}" for stage in expected}
    assert f"backend='{backend}'" in repr(smyrf.nn.SmyrfAttention(method, backend=backend))


@pytest.mark.parametrize("make", [smyrf.nn.SmyrfAttention, lambda **x: smyrf.nn.MultiheadAttention(16, 2, **x)])
def test_modules_refuse_an_unknown_backend(make):
    with pytest.raises(ValueError, match="backend='metal' must be None or one of"):
        make(backend="metal")


def test_without_a_name_the_fastest_backend_of_the_device_runs(stages):
    fastest = "native" if "native" in BACKENDS else "torch"
    q, k, v = clustered_problem(300, 290, 8, 8, 1, 2, 2)
    attention(q, k, v, method=Smyrf(2, 32))
    assert stages == {f"{fastest}.{stage}" for stage in SMYRF}
    assert find_backend(None, torch.device("cpu")) is BACKENDS[fastest]
    assert find_backend(None, torch.device("cuda")) is BACKENDS["torch"]


# --- stage by stage equal to the reference --------------------------------------------------------------

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
