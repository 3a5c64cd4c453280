"""Presets against the paper's tables, and recipes."""

import pytest

from smyrf import Dense, Smyrf, Tangent
from smyrf.experiments.nlp.presets import BERT, BERT_LARGE, PRESETS, ROBERTA, find_preset, preset_for
from smyrf.experiments.nlp.recipe import InputHashes, Recipe

# The paper's tables as it prints them: rows of GLUE (average, rounds, cluster size, then the tasks), of IMDB (memory,
# accuracy, rounds, cluster size), of back-and-forth (with the marks that its text asks for), and of the ablation.
GLUE = """
bert-128    82.69  1  1   57.83  84.43/84.68  88.41  91.31  89.70  65.70  93.46  88.73
smyrf-2x32  83.12  2  32  58.79  85.02/84.27  87.69  91.14  89.72  68.59  93.23  89.65
smyrf-2x16  81.74  2  16  58.90  82.86/83.49  85.72  89.53  89.33  64.98  93.12  87.75
bert-64     81.57  1  64  58.80  82.34/82.47  87.02  90.48  89.69  61.73  93.00  88.64
bert-32     73.56  1  32  56.40  64.51/63.41  77.89  79.81  88.59  55.23  92.66  83.53
"""
GLUE_MEMORY = {"bert-128": 1.0, "smyrf-2x32": 0.5, "smyrf-2x16": 0.25, "bert-64": 0.5, "bert-32": 0.25}
IMDB = """
bert          BERT     100    94.12  1   512
smyrf-8x32    BERT     50     92.64  8   32
smyrf-16x8    BERT     25     92.52  16  8
smyrf-8x8     BERT     12.5   91.46  8   8
smyrf-8x4     BERT     6.25   88.78  8   4
smyrf-4x4     BERT     3.125  87.49  4   4
roberta       RoBERTa  100    94.96  1   512
roberta-8x32  RoBERTa  50     93.72  8   32
"""
MODELS = {"BERT": BERT, "RoBERTa": ROBERTA}


@pytest.mark.parametrize("line", GLUE.split("\n")[1:-1], ids=lambda line: line.split()[0])
def test_a_glue_preset_is_a_row_of_the_papers_table(line):
    name, average, rounds, cluster, *figures = line.split()
    preset = PRESETS[f"glue/{name}"]
    expected = [tuple(map(float, figure.split("/"))) for figure in figures]
    assert preset.tasks == ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb")
    assert [preset.paper[task] for task in preset.tasks] == expected
    # The transcription is right if its average is: MNLI counts as two.
    flat = [one for figure in expected for one in figure]
    assert sum(flat) / len(flat) == pytest.approx(float(average), abs=0.006)
    recipe = preset.recipe
    assert (recipe.model, recipe.batch_size, recipe.epochs, recipe.warmup) == (BERT, 16, 3, 0.1)
    assert recipe.pad == "max_length" and recipe.n_train is recipe.n_eval is recipe.max_steps is None
    assert preset.rates == (5e-5, 3e-5, 2e-5)
    assert [one.learning_rate for one in preset.recipes(("rte",))] == [5e-5, 3e-5, 2e-5]
    if rounds == "1":  # "C = 1" of the first row means one cluster
        assert recipe.train_method == Dense() and recipe.max_length == (128 if cluster == "1" else int(cluster))
    else:
        assert recipe.train_method == Smyrf(int(rounds), int(cluster)) and recipe.max_length == 128
    assert recipe.eval_methods == (recipe.train_method,)
    assert recipe.train_method.key_visits(recipe.max_length) / 128 == GLUE_MEMORY[name]


@pytest.mark.parametrize("line", IMDB.split("\n")[1:-1], ids=lambda line: line.split()[0])
def test_an_imdb_preset_is_a_row_of_the_papers_table(line):
    name, model, memory, accuracy, rounds, cluster = line.split()
    preset = PRESETS[f"imdb/{name}"]
    recipe = preset.recipe
    assert preset.paper == {"imdb": (float(accuracy),)}
    assert recipe.model == MODELS[model]
    method = Dense() if rounds == "1" else Smyrf(int(rounds), int(cluster))
    assert recipe.train_method == method and recipe.eval_methods == (method,)
    assert method.memory_share(512) == float(memory) / 100
    _check_imdb_settings(preset)


@pytest.mark.parametrize(
    ("name", "model", "method", "evaluated", "figure"),
    [
        ("backandforth/roberta", ROBERTA, Smyrf(8, 32), Dense(), 94.62),
        ("backandforth/bert", BERT, Smyrf(8, 32), Dense(), 93.54),
        ("ablation/smyrf", ROBERTA, Smyrf(8, 32), Smyrf(8, 32), 93.7),
        ("ablation/e2lsh", ROBERTA, Smyrf(8, 32, transform="none"), Smyrf(8, 32, transform="none"), 89.3),
        (
            "ablation/reformer",
            ROBERTA,
            Smyrf(8, 32, transform="none", hashing="cross_polytope"),
            Smyrf(8, 32, transform="none", hashing="cross_polytope"),
            88.7,
        ),
        ("hyperpartisan", ROBERTA, Smyrf(8, 32), Smyrf(8, 32), 97.2),
    ],
)
def test_the_other_presets_are_the_papers_rows(name, model, method, evaluated, figure):
    preset = PRESETS[name]
    assert (preset.recipe.model, preset.recipe.train_method) == (model, method)
    assert preset.recipe.eval_methods[0] == evaluated
    assert preset.paper == {preset.tasks[0]: (figure,)}
    _check_imdb_settings(preset)


def test_large_models_have_the_figures_of_the_papers_text():
    assert PRESETS["glue/smyrf-large"].paper == {"cola": (60.4,), "qqp": (90.2,)}
    assert PRESETS["glue/bert-large"].paper == {"cola": (60.5,), "qqp": (89.3,)}
    assert {PRESETS[f"glue/{name}"].recipe.model for name in ("smyrf-large", "bert-large")} == {BERT_LARGE}


def test_rows_that_the_paper_does_not_have_carry_no_figure_and_say_so():
    ours = [preset for preset in PRESETS.values() if not preset.paper]
    assert {preset.name for preset in ours} == {
        "glue/tangent-50",
        "glue/tangent-25",
        "imdb/tangent-25",
        "imdb/tangent-12.5",
    }
    assert all("not in the paper" in preset.note for preset in ours)
    assert all(isinstance(preset.recipe.train_method, Tangent) for preset in ours)


def _check_imdb_settings(preset):
    recipe = preset.recipe
    assert (recipe.max_length, recipe.epochs, recipe.batch_size, preset.rates) == (512, 3, 8, (3e-5,))
    assert recipe.warmup == 0.0  # none is mentioned
    assert recipe.pad == "max_length" and recipe.n_train is recipe.n_eval is recipe.max_steps is None


def test_options_replace_what_a_preset_says():
    found = PRESETS["glue/smyrf-2x32"].recipes(("rte", "mrpc"), (3, 4), model="x", learning_rates=(1e-4,), epochs=1)
    assert [(one.task, one.seed, one.learning_rate) for one in found] == [
        ("rte", 3, 1e-4),
        ("mrpc", 3, 1e-4),
        ("rte", 4, 1e-4),
        ("mrpc", 4, 1e-4),
    ]
    (changed,) = PRESETS["imdb/bert"].recipes(train_method=Tangent(0.5))
    assert changed.eval_methods == (Tangent(0.5),)  # not the dense attention of the preset
    (crossed,) = PRESETS["imdb/bert"].recipes(train_method=Tangent(0.5), eval_methods=(Dense(),))
    assert crossed.eval_methods == (Dense(),)
    (back,) = PRESETS["backandforth/bert"].recipes(train_method=Tangent(0.5))
    assert back.eval_methods == (Dense(), Tangent(0.5))
    with pytest.raises(ValueError, match="must not be given together"):
        PRESETS["imdb/bert"].recipes(learning_rate=1e-4, learning_rates=(1e-5,))


def test_a_task_without_a_preset_has_the_papers_settings_and_dense_attention():
    for task, length, batch in (("wnli", 128, 16), ("imdb", 512, 8), ("hyperpartisan", 512, 8)):
        (recipe, *_) = preset_for(task).recipes((task,))
        assert (recipe.max_length, recipe.batch_size, recipe.train_method) == (length, batch, Dense())
        assert recipe.eval_methods == (Dense(),)
    with pytest.raises(ValueError, match="preset='glue/bert' must be one of"):
        find_preset("glue/bert")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "boolq"}, "task='boolq' must be one of"),
        ({"max_length": 3}, "max_length=3 must be at least 4"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_size": 1.5}, "batch_size=1.5 must be an int"),
        ({"epochs": 0}, "epochs=0 must be positive"),
        ({"epochs": float("inf")}, "epochs=inf must be positive, and at most"),
        ({"learning_rate": -1e-5}, "learning_rate=-1e-05 must be positive"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be positive"),
        ({"warmup": 1.0}, "warmup=1.0 must be in"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be in"),
        ({"pad": "left"}, "pad='left' must be one of max_length, longest"),
        ({"n_train": 1}, "n_train=1 must be at least 2"),
        ({"max_steps": 0}, "max_steps=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be in"),
        ({"eval_methods": (Dense(), Dense())}, "has a method twice"),
        ({"train_method": "dense"}, "must be a method"),
    ],
)
def test_a_recipe_refuses_what_cannot_be_run(changes, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Recipe(**{"task": "rte", "model": "x", **changes})


def test_a_recipe_survives_json_and_its_name_changes_with_everything():
    recipe = Recipe(task="SST-2", model="some/model", train_method=Smyrf(2, 32), eval_methods=(Dense(), Tangent(0.5)))
    assert Recipe.from_dict(recipe.to_dict()) == recipe and recipe.task == "sst2"
    others = [
        {"seed": 1},
        {"model": "other/model"},
        {"eval_methods": (Dense(),)},
        {"learning_rate": 1e-3},
        {"n_eval": 5},
        {"train_method": Smyrf(2, 32, transform="none")},
    ]
    names = {Recipe(**{**_plain(recipe), **change}).name(InputHashes("a", "m")) for change in others}
    names |= {recipe.name(InputHashes(*inputs)) for inputs in (("a", "m"), ("b", "m"), ("a", "n"))}
    assert len(names) == len(others) + 3
    with pytest.raises(ValueError, match="has no 'lr'"):
        Recipe.from_dict({**recipe.to_dict(), "lr": 1})
    with pytest.raises(ValueError, match="train_method"):
        Recipe.from_dict({"task": "rte"})


def test_methods_that_differ_have_names_that_differ():
    methods = [
        Dense(),
        Tangent(0.25),
        Smyrf(8, 32),
        Smyrf(8, 32, transform="none"),
        Smyrf(8, 32, transform="xbox"),
        Smyrf(8, 32, transform="none", hashing="cross_polytope"),
        Smyrf(8, 32, deduplicate=True),
    ]
    assert len({method.label for method in methods}) == len(methods)


def _plain(recipe):
    return {name: getattr(recipe, name) for name in recipe.__dataclass_fields__}
