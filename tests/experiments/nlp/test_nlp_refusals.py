"""What is wrong with a recipe, a model or a result, said before anything is trained."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import tiny

pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from smyrf import Dense, Smyrf  # noqa: E402
from smyrf.experiments.nlp.recipe import Recipe  # noqa: E402
from smyrf.experiments.nlp.run_recipes import run_recipes  # noqa: E402
from smyrf.experiments.nlp.train import finetune, prepare, result_file  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")


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
    with pytest.raises(ValueError, match="has no padding token"):
        finetune(Recipe(task="rte", model=str(tmp_path / "model")), tmp_path / "runs", data)


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
        (small, r"has 20 tokens, but its tokenizer gives the token id 2\d"),
        (tmp_path / "camembert", "max_length=20 is more than the 18 positions"),
        (tmp_path / "t5", "is an encoder with a decoder"),
    ):
        with pytest.raises(ValueError, match=words):
            finetune(Recipe(task="rte", model=str(place), max_length=20), tmp_path / "runs", data)
    assert not (tmp_path / "runs").exists()


def test_weights_that_do_not_fit_their_config_are_refused(data, tmp_path):
    deeper = Path(tiny.save_encoder(tmp_path / "deeper", n_layers=2))
    config = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"its weights do not fit its config: bert\.encoder\.layer\.2"):
        finetune(Recipe(task="rte", model=str(deeper), max_length=16, max_steps=1), tmp_path / "runs", data)
    assert not list((tmp_path / "runs").glob("*.run.json"))


def test_a_damaged_result_is_said_before_anything_is_trained(models, data, tmp_path):
    recipe = Recipe(task="rte", model=models["bert"], max_length=16, max_steps=1)
    prepared = prepare(replace(recipe, seed=1), data)
    file = result_file(tmp_path, prepared)
    file.write_text("{")
    with pytest.raises(ValueError, match=re.escape(file.name)):
        run_recipes(
            [recipe, replace(recipe, seed=1)], tmp_path, data, preset="", keep_model=False, console=Console(quiet=True)
        )
    assert [path.name for path in tmp_path.glob("*.run.json")] == [file.name]


def test_a_folder_for_token_ids_that_cannot_be_made_is_named(models, data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="the cache of token ids, cannot be created"):
        prepare(Recipe(task="rte", model=models["bert"], max_length=16), data)


@pytest.mark.parametrize(
    ("settings", "words"), [({"model": Path("a")}, "model="), ({"eval_methods": Dense()}, "tuple")]
)
def test_recipes_of_a_wrong_kind_are_refused(settings, words):
    with pytest.raises(TypeError, match=words):
        Recipe(**{"task": "rte", "model": "a", **settings})
