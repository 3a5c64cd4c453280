"""Runs: every preset for a step, resumption after a kill, several processes."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
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
from smyrf.nlp.checkpoints import last_checkpoint, remove_all, remove_half_written  # noqa: E402
from smyrf.nlp.command import finetune_all  # noqa: E402
from smyrf.nlp.order import GroupedByLength  # noqa: E402
from smyrf.nlp.presets import PRESETS  # noqa: E402
from smyrf.nlp.recipe import Recipe  # noqa: E402
from smyrf.nlp.results import load_result, load_results  # noqa: E402
from smyrf.nlp.tasks import TASKS  # noqa: E402
from smyrf.nlp.train import finetune, model_folder, prepare, result_file, set_attention  # noqa: E402


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Small random models of the classes that the presets name."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "bert": tiny.save_encoder(folder / "bert"),
        "large": tiny.save_encoder(folder / "bert-large", n_layers=4, hidden_size=32, num_attention_heads=4),
        "roberta": tiny.save_encoder(folder / "roberta", "roberta"),
        "calm": tiny.save_encoder(
            folder / "calm", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, hidden_size=32
        ),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name in TASKS:
        tiny.write_task(folder, name)
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_a_step_on_all_of_its_tasks(name, models, data, tmp_path):
    preset = PRESETS[name]
    kind = "roberta" if "roberta" in preset.recipe.model else "large" if "large" in preset.recipe.model else "bert"
    recipes = preset.recipes(model=models[kind], max_steps=1, learning_rates=preset.rates[:1], n_train=16, n_eval=6)
    assert [recipe.task for recipe in recipes] == list(preset.tasks)
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
        epochs=40,
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
    attention = smyrf.models.transformers.attention

    def spy(q, k, v, *, method, **options):
        seen.append((method, torch.is_grad_enabled()))
        return attention(q, k, v, method=method, **options)

    monkeypatch.setattr(smyrf.models.transformers, "attention", spy)
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


def test_what_a_kill_left_of_a_finished_run_is_removed(models, data, tmp_path):
    recipe = Recipe(task="rte", model=models["bert"], max_length=16, max_steps=1)
    first = finetune(recipe, tmp_path, data, keep_model=False)
    left = tmp_path / recipe.name(first.inputs) / "checkpoint-1"
    left.mkdir(parents=True)
    assert finetune(recipe, tmp_path, data) == first and not left.parent.exists()


def test_an_interrupted_evaluation_does_not_cost_the_training(models, data, tmp_path, monkeypatch):
    recipe = Recipe(task="rte", model=models["bert"], train_method=Smyrf(2, 4), max_length=16, epochs=6)
    whole = finetune(recipe, tmp_path / "whole", data)

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transformers.Trainer, "predict", interrupt)
        with pytest.raises(KeyboardInterrupt):
            finetune(recipe, tmp_path / "cut", data)
    steps = []
    training_step = transformers.Trainer.training_step

    def count(*arguments, **options):
        steps.append(1)
        return training_step(*arguments, **options)

    monkeypatch.setattr(transformers.Trainer, "training_step", count)
    again = finetune(recipe, tmp_path / "cut", data)
    assert not steps and again.losses == whole.losses
    assert [one.metrics for one in again.evaluations] == [one.metrics for one in whole.evaluations]


def test_a_run_of_several_processes_does_not_go_on_in_one(models, data, tmp_path):
    recipe = Recipe(task="rte", model=models["bert"], max_length=16, max_steps=2)
    checkpoint = tmp_path / prepare(recipe, data).name / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    for mark in ("whole-0-of-2", "whole-1-of-2"):
        (checkpoint / mark).touch()
    with pytest.raises(ValueError, match="was begun with 2 processes and cannot go on with 1"):
        finetune(recipe, tmp_path, data)


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
    monkeypatch.setattr("smyrf.nlp.progress.SECONDS_BETWEEN_LINES", 0.0)
    recipe = Recipe(task="rte", model=models["bert"], max_length=16, epochs=3)
    for number, terminal in enumerate((False, True)):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        finetune(recipe, tmp_path / str(number), data, console=console)
        text = console.file.getvalue()
        assert "RTE Dense seed 0: train" in text and "RTE Dense seed 0: evaluate Dense" in text and "left" in text
        assert "loss 0.6" in text and ("3 of 6, " in text or "6/6" in text)
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is shown again


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/no/such/model"}, "model='/no/such/model': cannot be loaded"),
        ({"max_length": 513}, "max_length=513 is more than the 512 positions"),
        ({"n_train": 1000}, "n_train=1000 is more than the 32 rows"),
    ],
)
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_what_does_not_fit_is_said_before_training(models, data, tmp_path, kind, changes, words):
    recipe = Recipe(**{"task": "rte", "model": models[kind], **changes})
    with pytest.raises(ValueError, match=words):
        finetune(recipe, tmp_path, data)
    assert not list(tmp_path.iterdir())


def test_a_model_whose_attention_cannot_be_replaced_is_refused_before_training(data, tmp_path, models):
    config = transformers.DebertaV2Config(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    config.save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(models["bert"]).save_pretrained(tmp_path / "model")
    recipe = Recipe(task="rte", model=str(tmp_path / "model"), train_method=Smyrf(2, 4))
    with pytest.raises(ValueError, match="no attention layer of"):
        finetune(recipe, tmp_path / "runs", data)


def test_a_decoder_without_padding_is_refused(data, tmp_path):
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2Model(config).save_pretrained(tmp_path / "model")
    transformers.GPT2Tokenizer(vocab={"<|endoftext|>": 0, "a": 1}, merges=[]).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="has no token for padding"):
        finetune(Recipe(task="rte", model=str(tmp_path / "model")), tmp_path / "runs", data)


def test_a_run_that_diverges_still_leaves_a_result(models, data, tmp_path):
    recipe = Recipe(task="stsb", model=models["bert"], max_length=16, max_steps=3, learning_rate=1e30)
    result = finetune(recipe, tmp_path, data)
    assert result.evaluations[0].metrics == {"pearson": 0.0, "spearman": 0.0}
    assert load_results(tmp_path) == [result]


def test_models_that_cannot_be_fine_tuned_are_refused(models, data, tmp_path):
    bert = tiny.save_encoder(tmp_path / "bert")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (Path(bert) / name).unlink()
    small = tiny.save_encoder(tmp_path / "small", vocab_size=20)
    camembert = transformers.CamembertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    camembert.max_position_embeddings = 20
    t5 = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    for config, place in ((camembert, "camembert"), (t5, "t5")):
        config.save_pretrained(tmp_path / place)
        transformers.AutoTokenizer.from_pretrained(models["roberta"]).save_pretrained(tmp_path / place)
    for place, words in (
        (bert, "has a tokenizer without words"),
        (small, r"knows 20 tokens, and its tokenizer has made number 2\d"),
        (tmp_path / "camembert", "max_length=20 is more than the 18 positions"),
        (tmp_path / "t5", "is an encoder with a decoder"),
    ):
        with pytest.raises(ValueError, match=words):
            finetune(Recipe(task="rte", model=str(place), max_length=20), tmp_path / "runs", data)
    assert not (tmp_path / "runs").exists()


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


def test_weights_that_do_not_fit_their_config_are_refused(data, tmp_path):
    deeper = Path(tiny.save_encoder(tmp_path / "deeper", n_layers=2))
    config = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"its weights do not fit its config: bert\.encoder\.layer\.2"):
        finetune(Recipe(task="rte", model=str(deeper), max_length=16, max_steps=1), tmp_path / "runs", data)
    assert not list((tmp_path / "runs").glob("*.run.json"))


def test_another_tokenizer_makes_another_run(data, tmp_path):
    folder = Path(tiny.save_encoder(tmp_path / "model"))
    recipe = Recipe(task="rte", model=str(folder), max_length=16, max_steps=1)
    before = prepare(recipe, data).name
    (folder / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text() + " ")
    assert prepare(recipe, data).name != before


def test_a_damaged_checkpoint_is_named(models, data, tmp_path, monkeypatch):
    recipe = Recipe(task="rte", model=models["bert"], max_length=16, epochs=8.0, batch_size=8)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.Trainer, "predict", stop)
    with pytest.raises(KeyboardInterrupt):
        finetune(recipe, tmp_path, data)
    monkeypatch.undo()
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path / "cache"))
    last = last_checkpoint(tmp_path / prepare(recipe, data).name)
    (last / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=rf"{last.name} cannot be read: .*; remove it"):
        finetune(recipe, tmp_path, data)


def test_a_damaged_result_is_said_before_anything_is_trained(models, data, tmp_path):
    recipe = Recipe(task="rte", model=models["bert"], max_length=16, max_steps=1)
    prepared = prepare(replace(recipe, seed=1), data)
    file = result_file(tmp_path, prepared)
    file.write_text("{")
    with pytest.raises(ValueError, match=re.escape(file.name)):
        finetune_all(
            [recipe, replace(recipe, seed=1)], tmp_path, data, preset="", keep_model=False, console=Console(quiet=True)
        )
    assert [path.name for path in tmp_path.glob("*.run.json")] == [file.name]


def test_a_folder_for_token_ids_that_cannot_be_made_is_named(models, data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="where token ids are kept, cannot be made"):
        prepare(Recipe(task="rte", model=models["bert"], max_length=16), data)


@pytest.mark.parametrize(
    ("settings", "words"), [({"model": Path("a")}, "model="), ({"eval_methods": Dense()}, "tuple")]
)
def test_recipes_of_a_wrong_kind_are_refused(settings, words):
    with pytest.raises(TypeError, match=words):
        Recipe(**{"task": "rte", "model": "a", **settings})


def test_half_written_checkpoints_are_not_resumed(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for step, marks in ((2, ["whole-0-of-1"]), (4, ["whole-0-of-2"]), (6, [])):
        (tmp_path / f"checkpoint-{step}").mkdir()
        for mark in marks:
            (tmp_path / f"checkpoint-{step}" / mark).touch()
    (tmp_path / "checkpoint-old").mkdir()
    assert last_checkpoint(tmp_path).name == "checkpoint-2"
    remove_half_written(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-old"]
    remove_all(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-old"]


def _command(models, data, output, *more, kind="bert"):
    words = ["finetune", "rte", "--model", models[kind], "--data", str(data), "--output", str(output)]
    words += ["--max-length", "16", "--lr", "1e-3", "--batch", "8", "--threads", "1", *more]
    return words


def _environment():
    source = str(Path(smyrf.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _only_result(folder):
    (file,) = folder.glob("*.run.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize(("pad", "n_processes"), [("max_length", 1), ("grouped", 1), ("grouped", 2)])
def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been_killed(models, data, tmp_path, pad, n_processes):
    command = [sys.executable, "-m", "smyrf.cli"]
    if n_processes > 1:
        several = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(n_processes)]
        command = [sys.executable, "-m", *several, "-m", "smyrf.cli"]
    # 150 steps, six in an epoch, a loss every 8, a checkpoint every 16: in the midst of an epoch
    more = ["--train-method", "smyrf:2x4", "--epochs", "25", "--pad", pad, "--batch", "6"]
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, *_command(models, data, killed, *more)],
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    for _ in range(1200):
        if list(killed.glob("*/checkpoint-32/whole-*")) or process.poll() is not None:
            break
        time.sleep(0.05)
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.kill()
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()
    assert not list(killed.glob("*.run.json"))
    (run_folder,) = killed.iterdir()
    at = int(last_checkpoint(run_folder).name.removeprefix("checkpoint-"))
    assert 32 <= at < 150
    (run_folder / "checkpoint-149").mkdir()  # one that the kill has left half-written
    for folder in (killed, tmp_path / "whole"):
        done = subprocess.run(
            [*command, *_command(models, data, folder, *more)], env=_environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    resumed, whole = _only_result(killed), _only_result(tmp_path / "whole")
    assert resumed["seconds"] is None and whole["seconds"] > 0
    assert resumed["n_steps"] == whole["n_steps"] == 150
    assert resumed["losses"] == whole["losses"]
    for one, other in zip(resumed["evaluations"], whole["evaluations"], strict=True):
        assert one["metrics"] == other["metrics"]
    weights = [torch_weights(folder) for folder in (killed, tmp_path / "whole")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def torch_weights(folder):
    from safetensors.torch import load_file

    (file,) = folder.glob("*/model/model.safetensors")
    return load_file(file)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_processes_do_what_one_does(launcher, models, data, tmp_path):
    if launcher == "torchrun":
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "smyrf.cli"]
    else:
        # Its option for a CPU starts one process, or several by MPI; this one starts several of whatever there is.
        several = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
        several += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "smyrf.cli"]
    more = ["--train-method", "smyrf:2x4", "--eval-method", "dense", "--eval-method", "smyrf:2x4", "--epochs", "5"]
    for folder, words in (("one", ["-m", "smyrf.cli"]), ("two", several)):
        done = subprocess.run(
            [sys.executable, *words, *_command(models, data, tmp_path / folder, *more, kind="calm")],
            env=_environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("1 of 1: RTE") == 1  # one of the processes speaks
    one, two = _only_result(tmp_path / "one"), _only_result(tmp_path / "two")
    assert (one["n_processes"], two["n_processes"]) == (1, 2)
    assert one["n_steps"] == two["n_steps"] == 20
    # The same rows in every step and no dropout: only hashes differ, and the order of sums.
    for (_, a), (_, b) in zip(one["losses"], two["losses"], strict=True):
        assert a == pytest.approx(b, abs=0.02)
    for a, b in zip(one["evaluations"], two["evaluations"], strict=True):
        assert a["n_rows"] == b["n_rows"] == 16
        assert a["metrics"]["accuracy"] == pytest.approx(b["metrics"]["accuracy"], abs=0.13)  # two of sixteen rows


def test_a_batch_that_processes_cannot_share_is_refused(models, data, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="batch_size=16 must be a multiple of the 3 processes"):
        prepare(Recipe(task="rte", model=models["bert"]), data)


def test_set_attention_goes_from_any_method_to_any_other(models):
    model = transformers.AutoModel.from_pretrained(models["bert"])
    before = model.config._attn_implementation
    for method in (Dense(), Smyrf(2, 4), Smyrf(2, 4), Tangent(0.5), Dense()):
        set_attention(model, method)
    assert model.config._attn_implementation == before
