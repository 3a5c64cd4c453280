"""Measures of a head against the whole map in float64."""

import math
from dataclasses import replace

import pytest
import torch

from smyrf import Dense, PerHead, Smyrf, Tangent, attention
from smyrf.call import Call
from smyrf.tools import subprocess_memory
from smyrf.tools.analysis import maps, spectrum
from smyrf.tools.analysis.approximate_map import approximate_rows
from smyrf.tools.analysis.cluster_sizes import balance
from smyrf.tools.analysis.head_profile import ProfileSums, query_spread
from smyrf.tools.analysis.inspection import inspect_heads
from smyrf.tools.analysis.maps import map_blocks
from smyrf.tools.analysis.sparsity import entropy, share_below, share_below_uniform
from smyrf.tools.analysis.spectrum import spectrum as find_spectrum
from smyrf.tools.analysis.visited_keys import VisitedKeys, best_mass, captured_mass

N, M, D, E = 331, 307, 7, 5
KINDS = ("plain", "masked", "causal", "causal and masked", "wide", "grouped")


def make(kind, n=N, m=M):
    """A call of each kind, with a batch of two and three heads."""
    if kind != "plain" and kind != "wide":
        m = n
    if kind == "wide":
        n, m = 97, 331
    heads = 4 if kind == "grouped" else 3
    q = 2 * torch.randn(2, heads, n, D)
    k, v = (
        torch.randn(2, 2 if kind == "grouped" else heads, m, D),
        torch.randn(2, 2 if kind == "grouped" else heads, m, E),
    )
    mask = torch.rand(2, m) < 0.7 if "masked" in kind else None
    if mask is not None:
        mask[:, 0] = True
    return Call(q, k, v, 0.6, mask, "causal" in kind)


def whole_map(head):
    """eq. 1, with everything in memory."""
    q, k = head.q[0, 0].double(), head.k[0, 0].double()
    scores = head.scale * q @ k.T
    seen = torch.ones_like(scores, dtype=torch.bool)
    if head.key_mask is not None:
        seen &= head.key_mask[0]
    if head.is_causal:
        seen = seen.tril()
    return scores.masked_fill(~seen, -torch.inf).softmax(1), seen


def met_pairs(head, method, seed):
    """Who meets whom, group by group."""
    met = torch.zeros(head.n_queries, head.n_keys, dtype=torch.bool)
    for groups in VisitedKeys(head, method, seed).lists:
        for queries, keys in zip(groups.queries[0].long(), groups.keys[0].long(), strict=True):
            for place, query in enumerate(queries.tolist() if groups.causal else []):
                its = keys[: place + 1]
                met[query, its[its >= 0]] |= query >= 0
            if not groups.causal:
                met[queries[queries >= 0][:, None], keys[keys >= 0]] = True
    return met


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(maps, "BLOCK_ELEMENTS", 1000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_blocks")
def test_blocks_of_rows_are_the_map(kind):
    call = make(kind)
    head = call.head(1, 2)
    wanted, seen = whole_map(head)
    blocks = list(map_blocks(head))
    assert all(block.weights.numel() <= 1000 or len(block.rows) == 1 for block in blocks)
    torch.testing.assert_close(torch.cat([block.weights for block in blocks]).double(), wanted, atol=1e-5, rtol=1e-4)
    assert torch.cat([block.n_seen for block in blocks]).tolist() == seen.sum(1).tolist()
    some = torch.tensor([3, 11, 90])
    torch.testing.assert_close(
        torch.cat([block.weights for block in map_blocks(head, some)]).double(), wanted[some], atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_blocks")
def test_sparsity_and_entropy_count_the_keys_that_a_query_may_see(kind):
    head = make(kind).head(0, 1)
    wanted, seen = whole_map(head)
    n_seen = seen.sum(1)
    blocks = list(map_blocks(head))
    for found, expected in (
        (share_below, ((wanted < 0.01) & seen).sum(1) / n_seen),
        (share_below_uniform, ((wanted < 1 / n_seen[:, None]) & seen).sum(1) / n_seen),
        (entropy, -(wanted * wanted.clamp(min=1e-300).log()).sum(1)),
    ):
        got = torch.cat([found(block) for block in blocks]).double()
        # In a causal row of one key, and at a threshold, rounding may decide.
        assert float((got - expected).abs().max()) < (5e-3 if found is not entropy else 1e-4)
        assert float((got - expected).abs().mean()) < 1e-4


def test_uniform_attention_has_nothing_below_the_uniform_weight():
    x = torch.zeros(1, 1, 77, 4)
    (block,) = map_blocks(Call(x, x, x, 0.5))
    assert share_below_uniform(block).max() == 0
    assert share_below(block).max() == 0  # 1/77 is more than 0.01
    assert entropy(block).tolist() == pytest.approx([math.log(77)] * 77)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "method", [Smyrf(3, 20), Smyrf(2, 20, deduplicate=True), Tangent(90), Tangent(60, levels=2), Dense()]
)
def test_reach_and_captured_mass_are_those_of_the_groups(kind, method):
    head = make(kind).head(1, 0)
    wanted, _ = whole_map(head)
    reach, met = VisitedKeys(head, method, 5), met_pairs(head, method, 5)
    rows = torch.arange(2, head.n_queries, 3)
    assert torch.equal(reach.keys(rows), met[rows])
    (block,) = map_blocks(head, rows)
    mass = captured_mass(block, reach.keys(rows))
    torch.testing.assert_close(mass.double(), (wanted * met)[rows].sum(1), atol=1e-5, rtol=1e-4)
    count = int(met.sum(1).max())
    best = best_mass(block, torch.full((len(rows), 1), count))[:, 0]
    torch.testing.assert_close(
        best.double(), wanted[rows].sort(1, descending=True).values[:, :count].sum(1), atol=1e-5, rtol=1e-4
    )
    assert bool((mass <= best + 1e-5).all())
    output = attention(
        head.q, head.k, head.v, method=method, key_mask=head.key_mask, is_causal=head.is_causal, scale=0.6, generator=5
    )
    torch.testing.assert_close(reach.output, output[0, 0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [Smyrf(3, 20), Tangent(90), Tangent(60, levels=2)])
def test_the_approximate_map_gives_the_methods_output(kind, method):
    head = make(kind).head(0, 1)
    found = torch.cat(list(approximate_rows(head, method, seed=3)))
    v = head.v[0, 0] if head.key_mask is None else head.v[0, 0].masked_fill(~head.key_mask[0][:, None], 0.0)
    torch.testing.assert_close(found @ v, VisitedKeys(head, method, 3).output, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found.sum(1), torch.ones(head.n_queries), atol=1e-4, rtol=0)
    some = torch.tensor([7, 3, 50, 51, 52, 53, 60])
    torch.testing.assert_close(torch.cat(list(approximate_rows(head, method, some, seed=3))), found[some])


def test_balance_counts_clusters_and_visits():
    x = torch.randn(1, 1, 64, 8)
    found = balance(VisitedKeys(Call(x, x, x, 0.3), Smyrf(4, 16), 0).lists, 64, 0.25)
    assert (found.n_clusters, found.fewest_queries, found.most_queries) == (4, 16, 16)
    assert (found.fewest_keys, found.most_keys) == (16, 16)
    assert (found.reached_keys, found.busiest_key) == (1.0, 0.25)
    mask = torch.arange(64)[None] < 9
    found = balance(VisitedKeys(Call(x, x, x, 0.3, mask), Smyrf(1, 16), 0).lists, 64, 1.0)
    assert (found.most_keys, found.reached_keys, found.busiest_key) == (9, 9 / 64, 1.0)


def test_causal_queries_are_measured_by_the_keys_that_each_meets():
    x = torch.randn(1, 2, 600, 8)
    call = Call(x, x, torch.randn_like(x), 0.6, is_causal=True)
    for head in inspect_heads([call], [Smyrf(4, 4096), Smyrf(2, 16), Tangent(64)], rows=600, n_values=0):
        exact, *others = head.outcomes
        assert exact.captured == pytest.approx(1.0, abs=1e-5) and exact.best == pytest.approx(1.0, abs=1e-5)
        assert exact.balance.busiest_key == 1.0  # all see the first key
        assert all(one.captured <= one.best + 1e-6 for one in others)


def test_scores_that_overflow_are_refused():
    x = torch.full((1, 1, 40, 4), 1e25)
    with pytest.raises(ValueError, match="scores that are not finite in head 0"):
        list(inspect_heads([Call(x, x, x, 1.0)], []))


# Singular values


def test_long_maps_of_low_rank_and_of_full_rank():
    n = 1100
    few = torch.cat([torch.full((1, 1, 1, 8), 30 / 8), 0.1 * torch.randn(1, 1, n - 1, 8)], 2)
    sink = Call(torch.ones(1, 1, n, 8) + 0.3 * torch.randn(1, 1, n, 8), few, few, 1.0)
    flat = torch.zeros(1, 1, n, 4)
    own = 3.0 * torch.randn(1, 1, n, 32)
    for call in (sink, Call(flat, flat, flat, 1.0), Call(own, own, own, 1.0)):
        wanted = torch.linalg.svdvals(whole_map(call.head(0, 0))[0])
        found = find_spectrum(call.head(0, 0), 64)
        values = torch.tensor(found.values, dtype=torch.float64)
        assert float(values[0]) == pytest.approx(float(wanted[0]), rel=1e-4)
        assert bool((values <= wanted[:64] + 1e-5 * wanted[0]).all())
        exact = float(wanted.square().sum() ** 2 / wanted.pow(4).sum())
        assert found.effective_rank == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_blocks")
def test_short_maps_are_decomposed_exactly(kind):
    head = make(kind).head(1, 1)
    rows = head.read_rows()
    wanted = torch.linalg.svdvals(whole_map(head)[0][rows])
    found = find_spectrum(head)
    assert (found.size, found.bound) == (len(wanted), 0.0)
    assert found.values == pytest.approx(wanted.tolist(), abs=1e-5)
    assert found.square == pytest.approx(float(wanted.square().sum()), rel=1e-5)
    squares = wanted.square()
    assert found.effective_rank == pytest.approx(float(squares.sum() ** 2 / squares.square().sum()), rel=1e-4)
    left = (squares.sum() - squares.cumsum(0)) / squares.sum()
    assert found.rank(0.2) == int((left > 0.04).sum()) + 1


@pytest.mark.parametrize("kind", ["plain", "causal and masked"])
@pytest.mark.parametrize("peaked", [0.3, 3.0])
@pytest.mark.usefixtures("small_blocks")
def test_the_largest_values_of_long_maps_lie_within_their_bound(monkeypatch, kind, peaked):
    monkeypatch.setattr(spectrum, "SHORT", 50)
    monkeypatch.setattr(spectrum, "BLOCK_SIZE", 8)
    call = make(kind)
    head = replace(call, scale=peaked * call.scale).head(0, 0)
    wanted = torch.linalg.svdvals(whole_map(head)[0][head.read_rows()])
    found = find_spectrum(head, n_values=20)
    assert len(found.values) == 20
    nearest = [float((wanted - value).abs().min()) for value in found.values]
    assert max(nearest) <= found.bound + 1e-5
    assert found.bound < 0.1 * found.values[0]
    assert found.values == pytest.approx(wanted[:20].tolist(), abs=found.bound + 1e-5)
    complete = float(wanted.square().sum() ** 2 / wanted.pow(4).sum())
    assert 0.8 * complete < found.effective_rank < 1.001 * complete


@pytest.mark.parametrize("n_values", [60, 119, 120, 500])
def test_nearly_all_values_of_a_long_map_are_all_of_them(monkeypatch, n_values):
    monkeypatch.setattr(spectrum, "SHORT", 16)
    q, k = torch.randn(2, 1, 1, 120, 8).unbind()
    head = Call(q, k, k, 0.8)
    found = find_spectrum(head, n_values=n_values)
    assert found.values == pytest.approx(torch.linalg.svdvals(whole_map(head)[0]).tolist(), abs=1e-5)


def test_ranks_of_maps_that_are_known():
    eye = 40 * torch.eye(24)[None, None]
    found = find_spectrum(Call(eye, eye, eye, 1.0))  # each query sees itself alone
    assert found.effective_rank == pytest.approx(24)
    assert found.rank() == 24
    assert find_spectrum(Call(0 * eye, eye, eye, 1.0)).rank() == 1


# Character and all of it together


def test_character_is_that_of_the_map():
    head = make("masked").head(0, 2)
    wanted = whole_map(head)[0]
    sums = ProfileSums(head)
    rows = head.read_rows()
    output = torch.cat([sums.add(block) for block in map_blocks(head, rows)]).double()
    a, v = wanted[rows], head.v[0, 0].double()
    torch.testing.assert_close(output, a @ v, atol=1e-5, rtol=1e-4)
    found = sums.profile()
    assert found.heaviest_key == pytest.approx(float(a.mean(0).max()), rel=1e-4)
    assert found.alike == pytest.approx(float(len(a) * a.mean(0).square().sum() / a.square().sum()), rel=1e-4)
    mean = v[head.key_mask[0]].mean(0)
    assert found.off_mean == pytest.approx(float((a @ v - mean).square().sum() / (a @ v).square().sum()), rel=1e-4)
    q, k = head.q[0, 0][rows].double(), head.k[0, 0][head.key_mask[0]].double()
    pairs = 0.6 * (q - q.mean(0)) @ (k - k.mean(0)).T
    assert query_spread(head) == pytest.approx(float(pairs.square().mean().sqrt()), rel=1e-4)


@pytest.mark.parametrize("kind", ["plain", "causal and masked", "grouped"])
def test_a_head_is_inspected_over_all_documents(kind):
    call = make(kind)
    methods = [Smyrf(3, 20), Tangent(90), Dense()]
    heads = list(inspect_heads([replace(call, only_dense="a bias"), replace(call, name="second")], methods, seed=4))
    assert [(one.layer, one.head) for one in heads] == [(1, head) for head in range(call.q.shape[1])]
    one = heads[1]
    rows, entropies, shares, small, uniform = 0, 0.0, 0.0, 0.0, 0.0
    errors, squares, captured, distinct, best = [0.0] * 3, 0.0, [0.0] * 3, [0.0] * 3, [0.0] * 3
    for document in range(2):
        head = call.head(document, 1)
        read = head.read_rows()
        a, seen = (x[read] for x in whole_map(head))
        dense = a @ head.v[0, 0].double()
        rows += len(read)
        squares += float(dense.square().sum())
        nats = -(a * a.clamp(min=1e-300).log()).sum(1)
        n_seen = seen.sum(1)
        entropies += float(nats.sum())
        shares += float((nats / n_seen.clamp(min=2).log()).sum())
        small += float(((a < 0.01) & seen).sum(1).div(n_seen).sum())
        uniform += float(((a < 1 / n_seen[:, None]) & seen).sum(1).div(n_seen).sum())
        for i, method in enumerate(methods):
            output = attention(
                head.q,
                head.k,
                head.v,
                method=method,
                key_mask=head.key_mask,
                is_causal=head.is_causal,
                scale=0.6,
                generator=4,
            )
            errors[i] += float((output[0, 0][read].double() - dense).square().sum())
            met = met_pairs(head, method, 4)[read]
            captured[i] += float((a * met).sum())
            distinct[i] += float(met.sum())
            counts = met.sum(1) if head.is_causal else torch.full((len(a),), head.key_visits(method))
            heaviest = a.sort(1, descending=True).values
            best[i] += sum(float(row[: int(n)].sum()) for row, n in zip(heaviest, counts, strict=True))
    assert (one.name, one.n_rows) == ("second", rows)
    assert one.entropy == pytest.approx(entropies / rows, rel=1e-4)
    assert one.entropy_share == pytest.approx(shares / rows, rel=1e-4)
    assert (one.below_small, one.below_uniform) == pytest.approx((small / rows, uniform / rows), abs=1e-3)
    assert one.profile.output_square == pytest.approx(squares, rel=1e-4)
    assert [o.error for o in one.outcomes] == pytest.approx([(e / squares) ** 0.5 for e in errors], rel=1e-3, abs=1e-5)
    assert [o.captured for o in one.outcomes] == pytest.approx([c / rows for c in captured], rel=1e-4)
    assert [o.distinct_keys for o in one.outcomes] == pytest.approx([d / rows for d in distinct])
    assert [o.best for o in one.outcomes] == pytest.approx([b / rows for b in best], rel=1e-4)
    assert one.outcomes[2].share == 1.0
    assert one.outcomes[1].key_visits == call.key_visits(Tangent(90))
    assert one.spectrum.values == find_spectrum(call.head(0, 1)).values


def test_a_sample_of_rows_is_near_the_whole():
    x = torch.randn(1, 1, 2000, 8)
    call = Call(x, x, torch.randn(1, 1, 2000, 8), 0.7)
    (whole,) = inspect_heads([call], [Smyrf(4, 64)], rows=2000, n_values=0)
    (part,) = inspect_heads([call], [Smyrf(4, 64)], rows=400, n_values=0)
    assert (whole.n_rows, part.n_rows, part.spectrum) == (2000, 400, None)
    assert part.entropy == pytest.approx(whole.entropy, rel=0.02)
    assert part.outcomes[0].captured == pytest.approx(whole.outcomes[0].captured, rel=0.1)
    assert part.outcomes[0].error == pytest.approx(whole.outcomes[0].error, rel=0.1)
    some, all_rows = (one.outcomes[0].balance for one in (part, whole))
    assert replace(some, busiest_key=all_rows.busiest_key) == all_rows
    assert some.busiest_key == pytest.approx(all_rows.busiest_key, abs=0.05)


def test_half_precision_and_a_document_without_keys_are_fine():
    x = torch.randn(2, 1, 40, 8, dtype=torch.bfloat16)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1] = False
    (one,) = inspect_heads([Call(x, x, x, 0.3, mask)], [Smyrf(2, 8), Tangent(20)])
    numbers = [one.entropy, one.below_small, one.profile.query_spread, one.profile.alike, one.outcomes[0].error]
    assert all(math.isfinite(number) for number in numbers)


def test_arguments_are_refused_before_any_work():
    x = torch.randn(1, 2, 9, 4)
    call = Call(x, x, x, 0.5)
    with pytest.raises(ValueError, match="rows=0 must be at least 1"):
        inspect_heads([call], [], rows=0)
    with pytest.raises(ValueError, match="n_values=-1 must be at least 0"):
        inspect_heads([call], [], n_values=-1)
    with pytest.raises(ValueError, match="is for several heads"):
        inspect_heads([call], [PerHead((Dense(), Dense()))])
    with pytest.raises(TypeError, match="must be a method"):
        inspect_heads([call], ["smyrf"])
    with pytest.raises(ValueError, match="only dense attention can serve any of them: a bias"):
        inspect_heads([replace(call, only_dense="a bias")], [])
    with pytest.raises(ValueError, match=r"q \(1, 2, 9, 4\) and k \(1, 2, 9, 4\): take one with Call.head"):
        find_spectrum(call)
    x[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite in q, k or v of head 0"):
        list(inspect_heads([call], []))


def test_a_long_text_needs_no_map(monkeypatch):
    if subprocess_memory.can_measure():
        pytest.skip(subprocess_memory.can_measure())
    monkeypatch.setattr(spectrum, "BLOCK_SIZE", 8)
    monkeypatch.setattr(spectrum, "MAX_PASSES", 3)
    monkeypatch.setattr(maps, "BLOCK_ELEMENTS", 1 << 18)
    n = 8192
    q, k, v = torch.randn(3, 1, 1, n, 8).unbind()

    def look():
        methods = [Smyrf(4, 64), Tangent(256)]
        (one,) = inspect_heads([Call(q, k, v, 0.35)], methods, rows=100, n_values=8)
        assert len(one.spectrum.values) == 8

    assert subprocess_memory.peak_bytes(look) < n * n  # a byte for each weight; the map has four, or eight
