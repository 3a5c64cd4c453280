"""The rows of a comparison: what is compared, drift by hand, costs, times, and what is remarked about them."""

import pytest
import torch

from smyrf import Dense, Smyrf, Tangent
from smyrf.tools import subprocess_memory
from smyrf.tools.compare import command, memory, run
from smyrf.tools.compare.contenders import Tuned, default_contenders, parse_contender, without_dense
from smyrf.tools.compare.drift import Outputs, drift, valid_outputs
from smyrf.tools.compare.inputs import Inputs
from smyrf.tools.compare.load_model import Subject
from smyrf.tools.compare.run import Comparison
from smyrf.tools.compare.table import remarks
from subjects import WORDS, loaded

pytestmark = pytest.mark.usefixtures("quick_comparison")


# Drift


def test_drift_is_what_one_gets_by_hand():
    dense = Outputs(torch.tensor([[3.0, 4.0], [0.0, 5.0]]), torch.tensor([[1.5, 4.5]]))
    found = drift(Outputs(torch.tensor([[3.0, 4.0], [4.0, 3.0]]), torch.tensor([[4.5, 1.5]])), dense)
    assert found.error == pytest.approx((20 / 50) ** 0.5)
    assert found.token_cosine == pytest.approx((1 + 0.6) / 2)
    assert found.worst_token_cosine == pytest.approx(0.6)
    assert found.pooled_cosine == found.worst_pooled_cosine == pytest.approx(2 * 1.5 * 4.5 / (1.5**2 + 4.5**2))
    assert found.agreement is None  # of one document


def test_agreement_counts_documents_whose_nearest_other_one_is_the_same():
    angles = torch.tensor([0.0, 0.1, 1.0, 1.2])
    dense = torch.stack([angles.cos(), angles.sin()], 1)
    assert drift(Outputs(dense, dense), Outputs(dense, dense)).agreement == 1.0
    angles[1] = 0.9  # nearer to the third, and it to this
    moved = torch.stack([angles.cos(), angles.sin()], 1)
    assert drift(Outputs(dense, 3 * moved), Outputs(dense, dense)).agreement == 0.5


def test_padding_counts_nowhere():
    hidden = torch.randn(2, 5, 3)
    valid = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    hidden[1, 2:] = torch.nan
    tokens, pooled = valid_outputs(hidden, valid)
    assert tokens.shape == (7, 3)
    torch.testing.assert_close(pooled, torch.stack([hidden[0].mean(0), hidden[1, :2].mean(0)]))


# What is compared


def test_typed_contenders():
    assert parse_contender("tangent:0.25", 0.05) == Tangent(0.25)
    assert parse_contender("tuned", 0.07) == Tuned(0.07)
    assert parse_contender("tuned:0.1,fallback=false", 0.05) == Tuned(0.1, fallback=False)
    for text, words in (
        ("tuned:2", "'2' is not a number between 0 and 1"),
        ("tuned:x", "'x' is not a number between 0 and 1"),
        ("tuned:0.1,levels=2", "'levels=2' is unknown"),
        ("tunned", "'tunned' is unknown"),
    ):
        with pytest.raises(ValueError, match="is not a method") as error:
            parse_contender(text, 0.05)
        assert words in str(error.value)
        assert str(error.value).endswith("or tuned, tuned:0.1 (error of each layer) and tuned:0.1,fallback=false")


def test_both_methods_have_the_same_key_visits_by_default():
    contenders = default_contenders(512, 0.05)
    visits = [one.key_visits(512) for one in contenders[:-1]]
    assert visits == [64, 128, 256] * 2
    assert contenders[-1] == Tuned(0.05)
    assert default_contenders(40, 0.05)[3] == Smyrf(1, 16)  # never less than a round


def test_dense_is_there_anyway_and_nothing_twice():
    assert without_dense([Tangent(0.5), Dense(), Tangent(0.5)]) == [Tangent(0.5)]
    assert Smyrf(8, 32, deduplicate=True).label == "Smyrf 8×32, pairs once"


# The comparison


@pytest.fixture(scope="module")
def bert(saved):
    model, inputs = loaded(saved("bert"), n_documents=5)
    comparison = Comparison(model, inputs.batches)
    return comparison, comparison.dense()


def test_exact_methods_change_nothing(bert):
    comparison, dense = bert
    for method in (Tangent(1.0), Smyrf(3, 150)):
        row = comparison.row(method)
        assert row.drift.error < 1e-5
        assert row.drift.worst_pooled_cosine > 1 - 1e-6
        assert row.drift.agreement == 1.0
        assert row.cost == dense.cost


def test_costs_are_those_of_the_method_at_the_real_length(bert):
    comparison, dense = bert
    assert (dense.cost.key_visits, dense.cost.share, dense.cost.score_bytes) == (150, 1.0, 150 * 150 * 4 * 4)
    cost = comparison.row(Smyrf(2, 16)).cost
    assert cost.key_visits == Smyrf(2, 16).key_visits(150) == 30
    assert (cost.share, cost.score_bytes) == (0.2, 30 * 150 * 4 * 4)


def test_a_row_is_repeatable_and_the_model_is_left_as_it_was(bert):
    comparison, _ = bert
    first = comparison.row(Smyrf(2, 16))
    assert 0.01 < first.drift.error < 2.0
    assert comparison.row(Smyrf(2, 16)).drift == first.drift
    again = comparison._run("dense attention")
    assert torch.equal(again.tokens, comparison.outputs.tokens)
    assert comparison.model.config._attn_implementation == "sdpa"


def test_more_keys_mean_less_drift(bert):
    comparison, _ = bert
    errors = [comparison.row(Tangent(budget)).drift.error for budget in (0.25, 0.5, 0.9)]
    assert errors == sorted(errors, reverse=True)


def test_the_size_of_batches_does_not_matter(saved, bert):
    comparison, _ = bert
    wanted = comparison.row(Tangent(0.4)).drift
    model, inputs = loaded(saved("bert"), n_documents=5, batch_size=5)
    other = Comparison(model, inputs.batches)
    other.dense()
    found = other.row(Tangent(0.4)).drift
    assert found.error == pytest.approx(wanted.error, rel=1e-4)
    assert found.worst_pooled_cosine == pytest.approx(wanted.worst_pooled_cosine, rel=1e-5)


def test_a_decoder_is_compared_by_its_last_hidden_states(saved):
    model, inputs = loaded(saved("gpt2"), length=300, n_documents=2)
    assert model.config.use_cache is False
    comparison = Comparison(model, inputs.batches)
    dense = comparison.dense()
    assert dense.cost.key_visits == 151  # the mean of 1 … 300
    row = comparison.row(Tangent(40))
    assert row.cost.key_visits < 151
    assert 0.0 < row.drift.error < 1.0
    assert row.drift.agreement is None


def test_tuned_keeps_dense_where_it_is_as_fast_and_says_so(bert):
    comparison, dense = bert
    row = comparison.row(Tuned(0.2))
    assert row.drift.error == 0.0
    assert row.methods == {}
    assert list(row.dense_layers.values()) == [2]
    assert remarks([dense, row])[0].startswith("tuned 0.2: 2 of 2 layers stay dense: dense is as fast")
    timed = dict(comparison.times([dense, row]))
    assert timed[0].seconds == timed[1].seconds > 0


def test_tuned_knows_the_layers_from_other_attention_of_the_model(saved):
    model, inputs = loaded(saved("bert"), n_documents=2)

    def attend(module, arguments, out):
        return torch.nn.functional.scaled_dot_product_attention(*3 * [out[:, None]])[:, 0]

    model.embeddings.register_forward_hook(attend)
    comparison = Comparison(model, inputs.batches)
    assert comparison.calls[0].name == "embeddings"
    comparison.dense()
    row = comparison.row(Tuned(0.3, fallback=False))
    assert len(row.methods) == 2
    method = row.as_dict(row)["method"]
    assert (method["kind"], method["max_error"], set(method["layers"])) == ("tuned", 0.3, set(row.methods))
    assert row.cost.key_visits > (150 + 2 * 32) / 3 - 1  # with the attention that stays


def test_remarks_that_hold_for_all_rows_are_said_once(bert):
    _, dense = bert
    rows = [dense] + [
        run.ModelRow(one, dense.drift, dense.cost, {"a": one}, {"its window is short": 1})
        for one in (Tangent(0.5), Smyrf())
    ]
    assert remarks(rows) == ["1 of 2 layers stay dense: its window is short"]


def test_peak_memory_is_measured_in_a_process_of_its_own(saved):
    if subprocess_memory.can_measure():
        pytest.skip(subprocess_memory.can_measure())
    batch = {"input_ids": torch.randint(len(WORDS), (1, 600))}
    name = str(saved("bert"))
    methods = {"encoder.layer.0.attention.self": Tangent(0.5)}
    assert 10**5 < memory.extra_bytes(name, "text", batch, methods, 1, "Tangent 50%") < 10**8


def test_a_process_that_fails_leaves_a_remark(bert, monkeypatch):
    comparison, dense = bert

    def fail(*_):
        raise RuntimeError("measuring the memory of Dense failed: killed")

    monkeypatch.setattr(command, "extra_bytes", fail)
    subject = Subject("", "text", None, comparison.model, Inputs(({},), 1, ""))
    row = command._with_memory(subject, dense, dense, 1)
    assert remarks([row]) == ["Dense: measuring the memory of Dense failed: killed"]
