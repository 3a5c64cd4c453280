"""Which heads are hard and why, and how heads and methods are put together for tables."""

from dataclasses import replace

import pytest
import torch

from smyrf import Dense, Smyrf, Tangent
from smyrf.call import Call
from smyrf.tools.analysis.hardness import MEASURES, hardness, spearman
from smyrf.tools.analysis.inspection import inspect_heads
from smyrf.tools.inspect.layers import HeadSet, by_family
from smyrf.tools.inspect.table import map_table


def test_spearman_knows_ties_and_chance():
    a = torch.tensor([1.0, 2.0, 2.0, 3.0])
    rho, _ = spearman(a, torch.tensor([10.0, 20.0, 20.0, 5.0]))
    ranks, others = torch.tensor([1, 2.5, 2.5, 4]), torch.tensor([2, 3.5, 3.5, 1])
    assert rho == pytest.approx(float(torch.corrcoef(torch.stack([ranks, others]))[0, 1]))
    assert spearman(torch.arange(30.0), -torch.arange(30.0)) == (pytest.approx(-1.0), 1e-4)
    _, p = spearman(torch.randn(30), torch.randn(30))
    assert p > 0.05
    # Under the null hypothesis p is uniform.
    assert 0.3 < sum(spearman(torch.randn(12), torch.randn(12), i)[1] for i in range(40)) / 40 < 0.7


def test_what_makes_heads_hard_is_found():
    """Heads that differ in one thing: how much the scores depend on the query."""
    sharpness = torch.linspace(0.1, 3.0, 16).view(1, 16, 1, 1)
    q, k = sharpness * torch.randn(1, 16, 200, 16), torch.randn(1, 16, 200, 16)
    heads = list(inspect_heads([Call(q, k, torch.randn(1, 16, 200, 16) + 1.0, 0.25)], [Tangent(40), Dense()]))
    found = hardness(heads, 0)
    by_name = {one.measure: one for one in found.correlations}
    assert by_name["query spread"].rho > 0.9 and by_name["query spread"].holds
    assert by_name["entropy"].rho < -0.9
    assert {head.head for head in found.hard} <= {13, 14, 15}
    # Sharper scores also mean fewer keys, each query's own, and outputs away from the mean: any of these is right.
    expected = ("its scores differ much", "its weights lie on few keys", "each query attends", "its output is far")
    for head in found.hard:
        assert head.reasons and all(reason.startswith(expected) for reason in head.reasons)
    assert "over 16 heads the error correlates with" in found.summary
    assert found.as_dict()["method"] == {"kind": "tangent", **found.as_dict()["method"]}
    assert [one.measure for one in found.correlations] == sorted(by_name, key=lambda name: -abs(by_name[name].rho))
    assert len({measure.name for measure in MEASURES}) == len(MEASURES)


def test_methods_of_a_family_are_left_out_where_they_are_exact_and_nowhere_else():
    x = torch.randn(1, 2, 64, 8)
    # Eight rounds of eight keys are as many visits as there are keys, and not the same keys.
    methods = [Smyrf(8, 8), Smyrf(1, 64), Smyrf(2, 8), Tangent(1.0), Dense()]
    heads = list(inspect_heads([Call(x, x, x, 0.4)], methods))
    assert heads[0].outcomes[0].share == 1.0
    assert by_family(heads) == {"Smyrf": [2, 0]}


def test_a_caption_is_whole_at_eighty_columns(shown):
    x = torch.randn(1, 2, 40, 8)
    every = HeadSet("all", tuple(inspect_heads([Call(x, x, x, 0.4)], [])))
    text = shown(map_table([], every, "maps"))
    assert "alike: 1 if all queries attend to the same keys" in " ".join(text.split())


def test_few_heads_or_no_relation_are_admitted():
    x = torch.randn(1, 3, 60, 8)
    few = hardness(list(inspect_heads([Call(x, x, x, 0.3)], [Smyrf(1, 20)])), 0)
    assert few.correlations == ()
    assert few.summary == "3 heads are too few to say what makes them hard"
    assert str(few.hard[0]).endswith("nothing that was measured explains it")
    x = torch.randn(1, 10, 60, 8)
    heads = list(inspect_heads([Call(x, x, x, 0.3)], [Smyrf(1, 20)]))
    errors = [0.5, 0.3, 0.9, 0.1, 0.7, 0.2, 0.8, 0.4, 0.6, 0.0]
    heads = [replace(h, outcomes=(replace(h.outcomes[0], error=e),)) for h, e in zip(heads, errors, strict=True)]
    none = hardness(heads, 0)
    assert none.summary == "no measure correlates with the error over the 10 heads"
    assert [(one.head, one.error, one.reasons) for one in none.hard] == [(2, 0.9, ())]
    with pytest.raises(ValueError, match="heads must hold at least one head"):
        hardness([], 0)
