"""Runs: every preset for a step, methods in effect, seeds, what makes another run."""

import io
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import tiny

pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import smyrf  # noqa: E402
from smyrf import Dense, Smyrf, Tangent  # noqa: E402
from smyrf.experiments.nlp.length_sampler import GroupedByLength  # noqa: E402
from smyrf.experiments.nlp.presets import PRESETS  # noqa: E402
from smyrf.experiments.nlp.recipe import Recipe  # noqa: E402
from smyrf.experiments.nlp.results import load_result, load_results  # noqa: E402
from smyrf.experiments.nlp.tasks import TASKS  # noqa: E402
from smyrf.experiments.nlp.train import finetune, model_folder, prepare, result_file, set_attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_a_step(name, models, data, tmp_path):
    """On all of its tasks for two rows of GLUE, on the first and the last for the others."""
    preset = PRESETS[name]
    kind = "roberta" if "roberta" in preset.recipe.model else "large" if "large" in preset.recipe.model else "bert"
    changes = {"max_steps": 1, "learning_rates": preset.rates[:1], "n_train": 16, "n_eval": 6}
    recipes = preset.recipes(model=models[kind], **changes)
    assert [recipe.task for recipe in recipes] == list(preset.tasks)
    if name not in ("glue/bert-128", "glue/smyrf-2x32"):
        recipes = list(dict.fromkeys([recipes[0], recipes[-1]]))
    for recipe in recipes:
        result = finetune(recipe, tmp_path, data, preset=name, keep_model=False)
        task = TASKS[recipe.task]
        assert result.n_steps == 1 and result.n_rows == 16 and len(result.losses) == 1
        asked = [(method, split) for method in recipe.eval_methods for split in task.splits]
        assert [(one.method, one.split) for one in result.evaluations] == asked
        for one in result.evaluations:
            assert tuple(one.metrics) == task.metrics and all(-1.0 <= value <= 1.0 for value in one.metrics.values())
    assert len(load_results(tmp_path)) == len(recipes)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json"] * len(recipes)


@pytest.mark.parametrize("method", [Dense(), Smyrf(4, 4), Tangent(0.5)], ids=repr)
def test_training_learns_and_leaves_a_model_that_says_so(method, models, data, tmp_path):
    recipe = Recipe(
        task="sst2",
        model=models["bert"],
        train_method=method,
        max_length=16,
        batch_size=8,
        epochs=16,
        learning_rate=1e-2,
    )
    result = finetune(recipe, tmp_path, data)
    assert result.evaluations[0].metrics["accuracy"] > 0.8  # 0.5 by chance, of 16 rows
    assert result.losses[-1][1] < 0.5 * result.losses[0][1]
    folder = model_folder(tmp_path, result)
    assert not list(folder.parent.glob("checkpoint-*"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(
            **tokenizer(["the film was great , lovely", "a dull , awful plot"], padding=True, return_tensors="pt")
        )
    assert [model.config.id2label[one] for one in logits.logits.argmax(-1).tolist()] == ["positive", "negative"]
    smyrf.replace_attention(model, Tangent(0.5))  # it was saved with its own attention


def test_the_method_of_training_is_in_effect_in_training_and_that_of_evaluation_in_evaluation(
    models, data, tmp_path, monkeypatch
):
    seen = []
    attention = smyrf.models.calls.attention

    def spy(q, k, v, *, method, **options):
        seen.append((method, torch.is_grad_enabled()))
        return attention(q, k, v, method=method, **options)

    monkeypatch.setattr(smyrf.models.calls, "attention", spy)
    recipe = Recipe(
        task="rte",
        model=models["bert"],
        train_method=Smyrf(2, 4),
        eval_methods=(Tangent(0.5), Dense(), Smyrf(2, 4)),
        max_length=16,
        max_steps=2,
    )
    result = finetune(recipe, tmp_path, data)
    assert set(seen) == {(Smyrf(2, 4), True), (Tangent(0.5), False), (Smyrf(2, 4), False)}
    assert [one.method for one in result.evaluations] == [Tangent(0.5), Dense(), Smyrf(2, 4)]


def test_seeds_change_the_run_and_the_same_seed_repeats_it(models, data, tmp_path):
    def run(folder, seed):
        recipe = Recipe(
            task="mrpc", model=models["bert"], train_method=Smyrf(2, 4), max_length=16, max_steps=3, seed=seed
        )
        return finetune(recipe, tmp_path / folder, data).losses

    assert run("a", 0) == run("b", 0) != run("a", 1)


def test_a_finished_run_is_read_and_other_data_make_another_run(models, tmp_path):
    recipe = Recipe(task="cola", model=models["bert"], max_length=16, max_steps=1)
    place = tiny.write_task(tmp_path / "data", "cola")
    first = finetune(recipe, tmp_path, place)
    file = result_file(tmp_path, prepare(recipe, place))
    before = file.read_bytes()
    assert finetune(recipe, tmp_path, place) == first == load_result(file)
    assert file.read_bytes() == before
    tiny.write_task(tmp_path / "data", "cola", n_train=40)
    assert finetune(recipe, tmp_path, place).inputs.data != first.inputs.data
    assert len(load_results(tmp_path)) == 2


def test_another_model_of_the_same_name_makes_another_run(data, tmp_path, monkeypatch):
    results = []
    for place, width in (("a", 16), ("b", 32)):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        tiny.save_encoder("encoder", hidden_size=width)
        results.append(
            finetune(Recipe(task="rte", model="encoder", max_length=16, max_steps=1), tmp_path / "runs", data)
        )
    assert results[0].losses != results[1].losses
    assert results[0].inputs.model != results[1].inputs.model and len(load_results(tmp_path / "runs")) == 2


@pytest.mark.parametrize("name", ["glue/bert-128", "glue/smyrf-2x32", "imdb/tangent-25"])
def test_one_step_changes_the_encoder(name, models, data, tmp_path):
    preset = PRESETS[name]
    (recipe,) = preset.recipes(preset.tasks[:1], model=models["bert"], max_steps=1, learning_rate=1e-3, n_train=16)
    trained = transformers.AutoModel.from_pretrained(model_folder(tmp_path, finetune(recipe, tmp_path, data)))
    before = transformers.AutoModel.from_pretrained(models["bert"])
    # A key's bias adds the same to all scores of a query: it has no gradient.
    changed = {
        n: not torch.equal(a, b) for (n, a), b in zip(trained.named_parameters(), before.parameters(), strict=True)
    }
    assert all(one for n, one in changed.items() if "encoder" in n and not n.endswith("key.bias"))


def test_progress_is_said_with_the_time_that_is_left(models, data, tmp_path, monkeypatch):
    monkeypatch.setattr("smyrf.experiments.nlp.progress.SECONDS_BETWEEN_LINES", 0.0)
    recipe = Recipe(task="rte", model=models["bert"], max_length=16, epochs=3)
    for number, terminal in enumerate((False, True)):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        finetune(recipe, tmp_path / str(number), data, console=console)
        text = console.file.getvalue()
        assert "RTE Dense seed 0: train" in text and "RTE Dense seed 0: evaluate Dense" in text and "left" in text
        assert "loss 0.6" in text and ("3 of 6, " in text or "6/6" in text)
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is shown again


def test_a_run_that_diverges_still_leaves_a_result(models, data, tmp_path):
    recipe = Recipe(task="stsb", model=models["bert"], max_length=16, max_steps=3, learning_rate=1e30)
    result = finetune(recipe, tmp_path, data)
    assert result.evaluations[0].metrics == {"pearson": 0.0, "spearman": 0.0}
    assert load_results(tmp_path) == [result]


def test_classifiers_of_other_tasks_and_models_with_further_outputs_are_fine(data, tmp_path, models):
    folder = tiny.save_encoder(tmp_path / "model", output_hidden_states=True)
    first = finetune(Recipe(task="mnli", model=folder, max_length=16, max_steps=1), tmp_path, data)
    again = Recipe(task="rte", model=str(model_folder(tmp_path, first)), max_length=16, max_steps=1)
    assert finetune(again, tmp_path, data).n_steps == 1


def test_dense_is_the_models_own_attention(models, data, tmp_path):
    recipe = Recipe(task="rte", model=models["bert"], eval_methods=(Dense(), Smyrf(2, 4)), max_length=16, max_steps=1)
    assert "smyrf" not in str(prepare(recipe, data).config._attn_implementation)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=50), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_grouped_batches_hold_every_row_once_and_depend_on_seed_and_epoch(lengths, batch_size, seed):
    order = GroupedByLength(lengths, batch_size, seed)
    first = list(order)
    assert sorted(first) == list(range(len(lengths)))
    assert list(order) == first
    order.set_epoch(1)
    later = GroupedByLength(lengths, batch_size, seed)
    later.set_epoch(1)
    assert list(order) == list(later)
    # Rows of one batch are neighbours in the sorted group that they come from.
    spread = [max(part) - min(part) for part in (_batch(lengths, first, i, batch_size) for i in range(len(order)))]
    ranks = sorted(lengths)
    widest = max(ranks[min(i + batch_size, len(ranks)) - 1] - ranks[i] for i in range(len(ranks)))
    assert max(spread) <= widest


def _batch(lengths, order, i, batch_size):
    start = i // batch_size * batch_size
    return [lengths[place] for place in order[start : start + batch_size]]


def test_grouping_leaves_dense_evaluation_as_it_is(models, data, tmp_path):
    metrics, steps = [], []
    for pad in ("max_length", "grouped"):
        recipe = Recipe(task="sst2", model=models["bert"], max_length=16, max_steps=1, learning_rate=1e-9, pad=pad)
        result = finetune(recipe, tmp_path, data)
        metrics.append(result.evaluations[0].metrics)
        steps.append(result.n_steps)
    assert metrics[0] == metrics[1] and steps == [1, 1]


def test_another_tokenizer_makes_another_run(data, tmp_path):
    folder = Path(tiny.save_encoder(tmp_path / "model"))
    recipe = Recipe(task="rte", model=str(folder), max_length=16, max_steps=1)
    before = prepare(recipe, data).name
    (folder / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text() + " ")
    assert prepare(recipe, data).name != before


def test_set_attention_goes_from_any_method_to_any_other(models):
    model = transformers.AutoModel.from_pretrained(models["bert"])
    before = model.config._attn_implementation
    for method in (Dense(), Smyrf(2, 4), Smyrf(2, 4), Tangent(0.5), Dense()):
        set_attention(model, method)
    assert model.config._attn_implementation == before
