"""Every backend against the float64 oracle and against the reference, gradients included."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from problems import SEED, STRIDES, assert_close, attend, backends, fast, make_groups, problem, strided
from problems import output_and_gradients as derive
from smyrf import Dense, Smyrf
from smyrf.backends import BACKENDS
from smyrf.backends import attend as attend_call
from smyrf.backends.dropout import keep
from smyrf.backends.reference.attend import merge_rounds
from smyrf.backends.torch import attend as torch_attend
from smyrf.backends.torch import gather, grouped_attention
from smyrf.call import Call
from smyrf.grouping.groups import FarKeys, Groups, all_pairs, pack, unpack


def double_problem(*sizes, **options):
    return problem(*sizes, **options, dtype=torch.float64)


def lists(q, k, method, key_mask=None, is_causal=False):
    return make_groups(q, k, k, method, key_mask=key_mask, is_causal=is_causal)


CASES = {
    "plain": {},
    "width": {"d": 16, "e": 16},
    "grouped": {"heads": 6, "kv_heads": 2},
    "few keys": {"m": 7},
    "many keys": {"n": 23, "m": 211},
}


@backends
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("method", [Smyrf(4, 11), Smyrf(4, 11, deduplicate=True), Dense()])
def test_backends_equal_the_oracle(backend, case, masked, method):
    q, k, v = double_problem(**CASES[case])
    mask = torch.rand(2, k.shape[2]) > 0.7 if masked else None
    groups = lists(q, k, method, mask)
    out, lse = attend(q, k, v, groups, scale=0.3, backend=backend)
    expected, expected_lse = oracle.attend(q, k, v, groups, 0.3)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)


@backends
@pytest.mark.parametrize("shape", [{"n": 600, "m": 600}, {"n": 600, "m": 300}, {"n": 300, "m": 700}])
def test_causal_lists_equal_the_oracle(backend, shape):
    q, k, v = double_problem(batch=1, heads=1, kv_heads=1, d=5, e=7, **shape)
    groups = lists(q, k, Smyrf(2, 16), torch.rand(1, k.shape[2]) > 0.3, is_causal=True)
    out, lse = attend(q, k, v, groups, scale=0.3, backend=backend)
    expected, expected_lse = oracle.attend(q, k, v, groups, 0.3)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)


def gradients(q, k, v, groups, **options):
    return derive(lambda *inputs: attend(*inputs, groups, **options)[0], q, k, v)


@fast
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_equal_the_references(backend, case, masked, causal, dropout):
    q, k, v = double_problem(**CASES[case])
    mask = torch.rand(2, k.shape[2]) > 0.7 if masked else None
    for method in (Smyrf(3, 11), Smyrf(3, 11, deduplicate=True)):
        groups = lists(q, k, method, mask, causal)
        kwargs = {"scale": 0.3, "dropout_p": dropout, "seed": SEED}
        expected = gradients(q, k, v, groups, backend="reference", **kwargs)
        assert_close(gradients(q, k, v, groups, backend=backend, **kwargs), expected, atol=1e-11, rtol=1e-11)


@pytest.fixture
def small_pieces(monkeypatch):
    """Chunks, slabs and units so small that every loop goes round several times."""
    monkeypatch.setattr(gather, "CHUNK_ELEMENTS", 500)
    monkeypatch.setattr(gather, "UNIT_SLOTS", 256)
    monkeypatch.setattr(torch_attend, "MERGE_ROWS", 19)
    monkeypatch.setattr(grouped_attention, "MAX_SCORES", 200)


@pytest.fixture
def always_fused(monkeypatch):
    monkeypatch.setattr(grouped_attention, "FUSED_FROM", 1)


@pytest.mark.parametrize("form", ["small_pieces", "always_fused"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_pieces_and_fused_operators_give_the_same(request, form, masked, causal):
    q, k, v = double_problem(n=331, m=331, d=8, e=8)
    mask = torch.rand(2, 331) > 0.7 if masked else None
    groups = lists(q, k, Smyrf(3, 40), mask, causal)
    expected = gradients(q, k, v, groups, scale=0.3, backend="reference")
    request.getfixturevalue(form)
    assert_close(gradients(q, k, v, groups, scale=0.3, backend="torch"), expected, atol=1e-11, rtol=1e-11)


@backends
def test_gradcheck_with_fixed_clusters(backend):
    q, k, v = (x.requires_grad_() for x in double_problem(n=13, m=11, d=3, e=2, heads=2, kv_heads=1))
    mask = torch.rand(2, 11) > 0.4
    groups = lists(q, k, Smyrf(2, 4), mask)

    def run(q, k, v):
        return attend(q, k, v, groups, scale=0.7, dropout_p=0.2, seed=SEED, backend=backend)[0]

    assert torch.autograd.gradcheck(run, (q, k, v))


def four_groups(n=40, m=44, rows=6):
    """Indices of four groups of queries and keys."""
    return torch.arange(n).view(4, -1).expand(rows, -1, -1), torch.arange(m).view(4, -1).expand(rows, -1, -1)


def far_keys(shared=False, rows=6, d=13, e=17):
    """Three far keys for each of four groups, some of which stand for nothing; `shared`: out of a table of five."""
    n_table = 5 if shared else 12
    bias = torch.randn(rows, n_table, dtype=torch.float64)
    bias[0, 1], bias[1, 3:] = -torch.inf, -torch.inf
    index = torch.tensor([[0, 1, 2], [0, 3, 4], [4, 2, 0], [3, 3, 1]]) if shared else torch.arange(12).view(4, 3)
    keys, values = (torch.randn(rows, n_table, width, dtype=torch.float64) for width in (d, e))
    return FarKeys(keys, values, bias, index.int())


@backends
@pytest.mark.parametrize("shared", [False, True])
def test_far_keys_are_keys_with_a_bias(backend, shared):
    """Far keys of a group equal ordinary keys that only this group holds, their bias a further coordinate."""
    q, k, v = double_problem(n=40, m=44, d=13, e=17)
    queries, keys = four_groups()
    far = far_keys(shared)
    out, lse = attend(q, k, v, [Groups(queries, keys, far=far)], scale=1.0, backend=backend)

    ones = torch.ones(2, 3, 40, 1, dtype=torch.float64)
    zeros = torch.zeros(2, 3, 44, 1, dtype=torch.float64)
    long_q, long_k = torch.cat([q, ones], -1), torch.cat([k, zeros], -1)
    own_keys, own_values, bias = (x.flatten(1, 2) for x in far.of_groups())  # (B, 12, …)
    own = torch.cat([own_keys, bias.clamp(min=-1e9)[..., None]], -1)
    long_k, long_v = torch.cat([long_k, own.view(2, 3, 12, 14)], 2), torch.cat([v, own_values.view(2, 3, 12, 17)], 2)
    numbers = torch.arange(44, 56).view(4, 3).expand(6, -1, -1)
    expected, expected_lse = oracle.attend(
        long_q, long_k, long_v, [Groups(queries, torch.cat([keys, numbers], -1))], 1.0
    )
    torch.testing.assert_close(out, expected, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(lse, expected_lse, atol=1e-11, rtol=1e-11)


@fast
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_far_keys_get_gradients(backend, shared, dropout):
    queries, keys = four_groups()
    *far, index = far_keys(shared)

    def run(name):
        def function(q, k, v, *far):
            groups = [Groups(queries.flip(1), keys), Groups(queries, keys, far=FarKeys(*far, index))]
            return attend(q, k, v, groups, scale=0.4, dropout_p=dropout, seed=SEED, backend=name)[0]

        return derive(function, *inputs)

    inputs = (*double_problem(n=40, m=44, d=13, e=17), *far)
    assert_close(run(backend), run("reference"), atol=1e-11, rtol=1e-11)


@backends
def test_a_query_without_keys_gives_zero_and_no_gradient(backend):
    q, k, v = (x.requires_grad_() for x in double_problem(n=6, m=4, batch=1, heads=1, kv_heads=1))
    groups = Groups(torch.tensor([[[0, 1, -1], [2, 3, -1]]]), torch.tensor([[[0, 1], [-1, -1]]]))
    out, lse = attend(q, k, v, [groups], backend=backend)
    assert (out[0, 0, 2:] == 0).all()  # two with an empty list of keys, two in no group at all
    assert (lse[0, 0, 2:] == -torch.inf).all()
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad.isfinite().all()
    assert (q.grad[0, 0, 2:] == 0).all()
    assert (k.grad[0, 0, 2:] == 0).all()


@fast
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_within_twice_the_error_of_pytorch(backend, dtype):
    q, k, v = problem(n=211, m=211, d=16, e=16)
    low = [x.to(dtype) for x in (q, k, v)]
    exact = oracle.dense(*low, 0.25)
    theirs = torch.nn.functional.scaled_dot_product_attention(*low, scale=0.25)
    (groups,) = lists(*low[:2], Dense())
    ours, lse = attend(*low, [groups], scale=0.25, backend=backend)
    assert ours.dtype == dtype
    assert lse.dtype == torch.float32
    assert (ours.double() - exact).abs().max() <= 2 * (theirs.double() - exact).abs().max()


@fast
def test_float32_is_within_twice_the_error_of_pytorch_gradients_within_three_times(backend):
    q, k, v = problem(n=211, m=211, d=16, e=16)
    (groups,) = lists(q, k, Dense())
    results = []
    for run, dtype in (
        (lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, scale=0.25), torch.float64),
        (lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, scale=0.25), torch.float32),
        (lambda *x: attend(*x, [groups], scale=0.25, backend=backend)[0], torch.float32),
    ):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = run(*inputs)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
    for i, (exact, theirs, ours) in enumerate(zip(*results, strict=True)):
        bar = (2 if i == 0 else 3) * (theirs.double() - exact).abs().max()
        assert (ours.double() - exact).abs().max() <= bar


@backends
@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_huge_and_tiny_scores_stay_exact(backend, factor):
    q, k, v = double_problem(n=31, m=37)
    groups = lists(q, k, Smyrf(2, 8))
    out, lse = attend(q * factor, k, v, groups, scale=1.0, backend=backend)
    expected, expected_lse = oracle.attend(q * factor, k, v, groups, 1.0)
    torch.testing.assert_close(out, expected, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(lse, expected_lse, atol=1e-11, rtol=1e-11)


@fast
@pytest.mark.parametrize("how", [*STRIDES, "expanded"])
def test_strides_do_not_matter(backend, how):
    q, k, v = double_problem(n=59, m=61, d=8, e=8)
    if how == "expanded":
        k, v = (x[:1, :1].expand(2, 3, -1, -1) for x in (k, v))
    odd = [strided(x, how) for x in (q, k, v)]
    if how != "expanded":
        assert not any(x.is_contiguous() for x in odd)
    groups = lists(q, k, Smyrf(3, 16))
    a = gradients(*(x.contiguous() for x in (q, k, v)), groups, scale=0.3, backend=backend)
    assert torch.equal(attend(*odd, groups, scale=0.3, backend=backend)[0], a[0])
    inputs = [x.detach().requires_grad_() for x in odd]
    out, _ = attend(*inputs, groups, scale=0.3, backend=backend)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    for x, expected in zip(torch.autograd.grad((out * weight).sum(), inputs), a[1:], strict=True):
        torch.testing.assert_close(x, expected)


@given(data=st.data(), seed=st.integers(0, 10**6))
def test_any_lists_at_all(data, seed):
    """Random groups: queries in some or in no list, keys repeated across groups, empty slots anywhere."""
    torch.manual_seed(seed)
    n, m, d, e = (data.draw(st.integers(1, 9)) for _ in range(4))
    q, k, v = double_problem(n, m, d, e, batch=1, heads=2, kv_heads=data.draw(st.sampled_from([1, 2])))
    groups = []
    for _ in range(data.draw(st.integers(1, 3))):
        n_groups, slots, size = (data.draw(st.integers(1, 4)) for _ in range(3))
        queries = torch.full((2, n_groups * slots), -1)
        for b in range(2):
            some = torch.randperm(n)[: n_groups * slots]
            queries[b, torch.randperm(n_groups * slots)[: len(some)]] = some
        keys = torch.stack(
            [torch.stack([torch.randperm(max(m, size))[:size] for _ in range(n_groups)]) for _ in range(2)]
        )
        keys = torch.where((keys < m) & (torch.rand(keys.shape) > 0.2), keys, -1)
        groups.append(Groups(queries.view(2, n_groups, slots), keys))
    expected, expected_lse = oracle.attend(q, k, v, groups, 0.5)
    reference = gradients(q, k, v, groups, scale=0.5, backend="reference")
    torch.testing.assert_close(reference[0].detach(), expected, atol=1e-12, rtol=1e-12)
    for backend in BACKENDS:
        assert_close(gradients(q, k, v, groups, scale=0.5, backend=backend), reference, atol=1e-12, rtol=1e-12)
        lse = attend(q, k, v, groups, scale=0.5, backend=backend)[1]
        torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("slots", [32, 50])
def test_cuda_operators_are_called_as_their_signatures_say(slots):
    """Only shapes, on the meta device: this says nothing about their numbers, which need a GPU."""
    q = torch.empty(5, 1, slots, 16, device="meta")
    k = torch.empty(5, 1, 70, 16, device="meta")
    out, lse = grouped_attention._cuda_forward(q, k, k, False, 0.3)
    assert out.shape == q.shape
    assert lse.shape == (5, 1, slots)
    grads = grouped_attention._cuda_backward(out, q, k, k, out, lse, False, 0.3)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"groups": []}, "at least one list"),
        ({"rows": 2}, r"queries \(2, .* but q has batch · heads = 6 rows"),
        ({"dropout_p": 0.5}, "dropout_p=0.5 needs a dropout_seed"),
        ({"backend": "metal"}, "backend='metal' must be None or one of"),
    ],
)
def test_bad_groups_are_refused(change, words):
    q, k, v = double_problem()
    groups = [g.rows(slice(0, change.pop("rows", 6))) for g in lists(q, k, Smyrf(2, 8))]
    with pytest.raises(ValueError, match=words):
        attend(q, k, v, **{"groups": groups, **change})


def test_packing_loses_nothing():
    q, k, _ = double_problem()
    before = [*lists(q, k, Smyrf(2, 8, deduplicate=True)), *lists(q, k, Smyrf(2, 8), is_causal=True)]
    before.append(Groups(before[0].queries[:, :4], before[0].keys[:, :4], far=far_keys()))
    after = unpack(*pack(before))
    for a, b in zip(before, after, strict=True):
        assert a.queries is b.queries
        assert a.keys is b.keys
        assert (a.causal, a.multiplicity is None, a.far is None) == (b.causal, b.multiplicity is None, b.far is None)


def test_merged_rounds_are_one_softmax():
    """Eq. 15 over two disjoint halves of the keys is dense attention."""
    scores, values = torch.randn(5, 8, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    halves = [(scores[:, i : i + 4], values[i : i + 4]) for i in (0, 4)]
    out, lse = merge_rounds(
        torch.stack([s.softmax(-1) @ v for s, v in halves]), torch.stack([s.logsumexp(-1) for s, _ in halves])
    )
    torch.testing.assert_close(out, scores.softmax(-1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_dropout_masks_are_fair_and_independent():
    streams, index = torch.arange(4), torch.arange(100).expand(4, -1)
    kept = keep(SEED, streams, index, index, 0.3) > 0
    share = kept.double().mean((1, 2))
    assert ((share - 0.7).abs() < 0.02).all()
    assert ((kept.double().mean(1) - 0.7).abs() < 0.25).all()  # no key and no query is favoured
    assert ((kept.double().mean(2) - 0.7).abs() < 0.25).all()
    agree = (kept[0] == kept[1]).double().mean()
    assert abs(agree - (0.7**2 + 0.3**2)) < 0.03
    other = keep(torch.tensor(2**40 + 11), streams, index, index, 0.3) > 0
    assert abs((kept == other).double().mean() - (0.7**2 + 0.3**2)) < 0.03


@fast
def test_dropout_keeps_the_expectation(backend):
    q, k, v = double_problem(n=16, m=32, batch=1, heads=1, kv_heads=1)
    groups = [all_pairs(1, 16, 32, None, q.device)]
    exact, _ = attend(q, k, v, groups, backend=backend)
    runs = torch.stack(
        [attend(q, k, v, groups, dropout_p=0.4, seed=torch.tensor(i), backend=backend)[0] for i in range(400)]
    )
    error = (runs.mean(0) - exact).abs() / (runs.std(0) / 20)
    assert error.max() < 5  # standard errors
    assert runs.std(0).min() > 0


@backends
def test_dropping_everything_gives_zero(backend):
    q, k, v = double_problem(n=16, m=32)
    out, _ = attend(q, k, v, lists(q, k, Smyrf(2, 4)), dropout_p=1.0, seed=SEED, backend=backend)
    assert (out == 0).all()


def far_of_width(value_width):
    return FarKeys.per_group(torch.randn(4, 2, 1, 5), torch.randn(4, 2, 1, value_width), torch.randn(4, 2, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.randn(1, 3, 8, 5), "v": torch.randn(1, 3, 8, 5)}, "do not belong together"),
        ({"k": torch.randn(1, 2, 8, 4)}, "do not belong together"),
        ({"v": torch.randn(1, 2, 7, 5)}, "do not belong together"),
        ({"k": torch.randn(1, 2, 8, 5).double()}, "must have one dtype"),
        ({"keys": torch.zeros(4, 1, 4, dtype=torch.int64)}, "groups has queries"),
        ({"multiplicity": torch.ones(4, 2, 4, 3, dtype=torch.int16)}, "groups has multiplicity"),
        ({"far": far_of_width(6)}, "far keys of shapes"),
        ({"far": far_of_width(5)._replace(of_group=torch.zeros(3, 1, dtype=torch.int32))}, "far keys of shapes"),
        ({"far": far_of_width(5), "causal": True}, "a causal list with far keys"),
        ({"keys": torch.full((4, 2, 4), 2**31)}, "2147483648 of keys is out of range"),
    ],
)
def test_what_does_not_belong_together_is_refused(change, message):
    index = torch.arange(8).view(1, 2, 4).expand(4, 2, 4)
    tensors = {"q": torch.randn(1, 4, 8, 5), "k": torch.randn(1, 2, 8, 5), "v": torch.randn(1, 2, 8, 5)}
    of_groups = {"queries": index, "keys": index}
    for name, value in change.items():
        (tensors if name in tensors else of_groups)[name] = value
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        attend(**tensors, groups=[Groups(**of_groups)])


def test_dropout_of_any_seed_is_the_same_in_all_backends():
    q, k, v = torch.randn(3, 1, 2, 30, 5).unbind()
    index = torch.arange(30).view(1, 1, 30).expand(2, 1, 30)
    for seed in (-5, 2**40 + 3):
        outs = [
            attend(q, k, v, [Groups(index, index)], dropout_p=0.4, seed=torch.tensor(seed), backend=name)[0]
            for name in BACKENDS
        ]
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0])


@backends
@pytest.mark.parametrize("which", ["queries", "keys"])
@pytest.mark.parametrize("wrong", [4, -2])
def test_an_index_out_of_range_is_refused_by_every_backend(backend, which, wrong):
    x, index = torch.randn(1, 2, 4, 8), torch.arange(4).expand(2, 1, 4)
    bad = index.clone()
    bad[0, 0, 2] = wrong
    with pytest.raises(IndexError, match=f"{wrong} of {which} is out of range"):
        attend(x, x, x, [Groups(**{"queries": index, "keys": index, which: bad})], backend)


def test_a_key_mask_beside_groups_is_refused():
    x, index = torch.randn(1, 1, 4, 8), torch.arange(4).expand(1, 1, 4)
    call = Call(x, x, x, 0.5, key_mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="key_mask must be None"):
        attend_call(call, [Groups(index, index)])
