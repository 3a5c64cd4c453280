"""The paper's tables rebuilt from results."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

for module in ("transformers", "datasets", "accelerate", "sklearn", "matplotlib"):
    pytest.importorskip(module)

from smyrf import Dense, Smyrf, Tangent  # noqa: E402
from smyrf.__main__ import app  # noqa: E402
from smyrf.experiments.nlp import plots  # noqa: E402
from smyrf.experiments.nlp.format_tables import figure_table, lines, markdown, preset_table, rich_table  # noqa: E402
from smyrf.experiments.nlp.presets import PRESETS  # noqa: E402
from smyrf.experiments.nlp.recipe import InputHashes, Recipe  # noqa: E402
from smyrf.experiments.nlp.result_tables import Column, build_tables  # noqa: E402
from smyrf.experiments.nlp.results import Evaluation, Result, load_result, load_results  # noqa: E402
from smyrf.experiments.nlp.tasks import TASKS  # noqa: E402
from smyrf.experiments.nlp.write_report import write_report  # noqa: E402

IMDB = Column("imdb", "test")


def run(task, method, *values, seed=0, evaluated=None, data="d", weights="m", **settings):
    """A result with one evaluation for each value, in the order of the task's splits."""
    evaluated = method if evaluated is None else evaluated
    settings = {"model": "some/minilm", "max_length": 512 if task == "imdb" else 128, **settings}
    recipe = Recipe(task=task, train_method=method, eval_methods=(evaluated,), seed=seed, **settings)
    evaluations = tuple(
        Evaluation(evaluated, split, 100, dict.fromkeys(TASKS[task].metrics, value), 1.0)
        for split, value in zip(TASKS[task].splits, values, strict=True)
    )
    return Result(recipe, evaluations, InputHashes(data, weights), "", 10, 80, ((5, 0.7), (10, 0.6)), 3.0, 2, 1)


def by_name(results):
    return {table.name: table for table in build_tables(results)}


def printed(table, width=100):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_the_imdb_table_has_mean_deviation_gap_and_the_papers_figures():
    results = [run("imdb", Dense(), value, seed=seed) for seed, value in enumerate((0.90, 0.92, 0.94))]
    results += [run("imdb", Smyrf(8, 32), value, seed=seed) for seed, value in enumerate((0.89, 0.90, 0.94))]
    results.append(run("imdb", Tangent(0.25), 0.91))
    table = by_name(results)["imdb"]
    assert [row.label for row in table.rows] == ["Dense", "Smyrf 8×32", "Tangent 25%"]
    assert [table.memory(row) for row in table.rows] == [1.0, 0.5, 0.25]
    assert lines(table) == [
        ["Dense", "100%", "92.0 ± 2.0", "–", "3", "94.12 BERT", "–"],
        ["Smyrf 8×32", "50%", "91.0 ± 2.6", "−1.0 ± 1.0", "3", "92.64 BERT", "−1.48"],
        ["Tangent 25%", "25%", "91.0", "+1.0", "1", "–", "–"],
    ]


def test_the_glue_table_averages_as_the_paper_does():
    figures = PRESETS["glue/smyrf-2x32"].paper
    results = [
        run(task, Smyrf(2, 32), *(0.01 * (one + shift) for one in figure), seed=seed)
        for task, figure in figures.items()
        for seed, shift in ((0, -1.0), (1, 1.0))
    ]
    table = by_name(results)["glue"]
    assert [column.title for column in table.columns] == [
        "CoLA", "MNLI-m", "MNLI-mm", "MRPC", "QNLI", "QQP", "RTE", "SST-2", "STS-B",
    ]  # fmt: skip
    average = table.average(table.rows[0])
    assert average.mean == pytest.approx(83.12, abs=0.01) == average.paper
    assert average.std == pytest.approx(2**0.5)
    ours, paper = lines(table)
    assert ours[:4] == ["Smyrf 2×32", "50%", "83.1 ± 1.4", "58.8 ± 1.4"]
    assert paper[:4] == ["  paper", "", "83.12", "58.79"]


def test_an_average_is_of_what_all_rows_have_and_truncation_counts_as_memory():
    results = [run(task, Dense(), value) for task, value in (("cola", 0.8), ("rte", 0.6), ("sst2", 0.9))]
    results += [run(task, Dense(), value, max_length=64) for task, value in (("cola", 0.7), ("sst2", 0.8))]
    table = by_name(results)["glue"]
    assert [(row.max_length, table.memory(row)) for row in table.rows] == [(128, 1.0), (64, 0.5)]
    assert [table.average(row).mean for row in table.rows] == pytest.approx([85.0, 75.0])
    assert lines(table)[2][:5] == ["Dense, 64 tokens", "50%", "75.0", "70.0", "–"]
    assert "avg.: over the tasks that all rows have" in markdown(table)
    one = by_name([run("cola", Dense(), 0.8), run("rte", Smyrf(2, 32), 0.8)])["glue"]
    assert one.average(one.rows[0]) is None and "avg." not in markdown(one)


def test_back_and_forth_and_ablation_have_tables_of_their_own():
    half, plain = Smyrf(8, 32), Smyrf(8, 32, transform="none")
    angular = Smyrf(8, 32, transform="none", hashing="cross_polytope")
    results = [
        run("imdb", Dense(), 0.94),
        run("imdb", half, 0.92),
        run("imdb", plain, 0.88),
        run("imdb", angular, 0.87),
    ]
    results += [run("imdb", half, 0.93, evaluated=Dense()), run("imdb", Dense(), 0.91, evaluated=half)]
    tables = by_name(results)
    assert list(tables) == ["imdb", "backandforth", "ablation"]
    assert [row.label for row in tables["imdb"].rows] == ["Dense", "Smyrf 8×32"]
    back = tables["backandforth"]
    assert [row.label for row in back.rows] == [
        "Dense", "Dense → Smyrf 8×32", "Smyrf 8×32", "Smyrf 8×32 → Dense",
    ]  # fmt: skip
    assert [row.cells[IMDB].paper for row in back.rows] == [94.12, None, 92.64, 93.54]
    assert [round(back.gap(row, IMDB).mean, 6) for row in back.rows[1:]] == [-3.0, -2.0, -1.0]
    ablation = tables["ablation"]
    cells = [row.cells[IMDB] for row in ablation.rows]
    assert [(cell.paper, cell.paper_model) for cell in cells] == [
        (94.96, "RoBERTa"), (93.7, "RoBERTa"), (89.3, "RoBERTa"), (88.7, "RoBERTa"),
    ]  # fmt: skip
    assert [round(ablation.gap(row, IMDB).paper, 2) for row in ablation.rows[1:]] == [-1.26, -5.66, -6.26]


def test_a_roberta_stands_beside_the_papers_roberta():
    results = [run("imdb", method, 0.9, model="x/roberta-small") for method in (Dense(), Smyrf(8, 32))]
    table = by_name(results)["imdb"]
    assert [row.cells[IMDB].paper for row in table.rows] == [94.96, 93.72]


def test_of_several_learning_rates_the_best_mean_counts():
    values = {1e-5: (0.80, 0.90), 2e-5: (0.86, 0.86)}
    results = [
        run("rte", Dense(), value, seed=seed, learning_rate=rate)
        for rate, both in values.items()
        for seed, value in enumerate(both)
    ]
    table = by_name(results)["glue"]
    (cell,) = table.rows[0].cells.values()
    assert (cell.rate, cell.n_rates, cell.mean) == (2e-5, 2, pytest.approx(86.0))
    assert "the best of several learning rates" in markdown(table)


def test_a_half_finished_grid_does_not_report_the_luckiest_seed():
    results = [run("rte", Dense(), 0.7, seed=seed, learning_rate=1e-5) for seed in range(3)]
    table = by_name([*results, run("rte", Dense(), 0.73, learning_rate=2e-5)])["glue"]
    (cell,) = table.rows[0].cells.values()
    assert (cell.rate, cell.n_rates, cell.mean) == (1e-5, 2, pytest.approx(70.0))


@pytest.mark.parametrize("change", [{"n_train": 50}, {"epochs": 1.0}, {"data": "other"}])
def test_runs_with_other_settings_are_told_apart(change):
    table = by_name([run("rte", Dense(), 0.6), run("rte", Dense(), 0.8, **change)])["glue"]
    (name,) = change
    assert len(table.rows) == 2 and all(f"{name}=" in row.label for row in table.rows)


def test_a_gap_is_between_rows_of_the_same_settings():
    small, large = {"n_train": 100, "data": "a"}, {"n_train": 20000, "data": "b"}
    results = [run("imdb", Dense(), 0.6, **small), run("imdb", Dense(), 0.93, **large)]
    results += [run("imdb", Smyrf(8, 32), 0.92, **large), run("imdb", Smyrf(8, 8), 0.5, n_train=7, data="c")]
    table = by_name(results)["imdb"]
    gaps = {row.label: table.gap(row, IMDB) for row in table.rows}
    assert gaps["Smyrf 8×32, n_train=20000"].mean == pytest.approx(-1.0)
    assert gaps["Smyrf 8×8, n_train=7"] is None
    # Rows of which each has settings of its own say so as well.
    table = by_name([run("imdb", Dense(), 0.6, **small), run("imdb", Smyrf(8, 32), 0.92, **large)])["imdb"]
    assert [row.label for row in table.rows] == ["Dense, n_train=100", "Smyrf 8×32, n_train=20000"]


def test_padding_tells_no_dense_rows_apart():
    results = [run("rte", Dense(), 0.7, pad="longest"), run("rte", Smyrf(2, 32), 0.6)]
    table = by_name(results)["glue"]
    assert [row.label for row in table.rows] == ["Dense", "Smyrf 2×32"]
    assert table.gap(table.rows[1], table.columns[0]).mean == pytest.approx(-10.0)
    results.append(run("rte", Smyrf(2, 32), 0.5, pad="longest"))
    table = by_name(results)["glue"]
    assert [row.label for row in table.rows] == ["Dense", "Smyrf 2×32, pad=max_length", "Smyrf 2×32, pad=longest"]
    assert table.gap(table.rows[2], table.columns[0]).mean == pytest.approx(-20.0)


def test_models_have_tables_of_their_own():
    found = build_tables([run("rte", Dense(), 0.6), run("rte", Dense(), 0.8, model="other")])
    assert [table.model for table in found] == ["some/minilm", "other"]


def test_plots_tell_the_rows_of_the_ablation_apart():
    methods = [PRESETS[f"ablation/{name}"].recipe.train_method for name in ("smyrf", "e2lsh", "reformer")]
    table = build_tables([run("imdb", method, 0.9) for method in methods])[-1]
    families = {plots._family(table, row) for row in table.rows}
    assert families == {"Smyrf", "Smyrf, E2LSH", "Smyrf, cross-polytope"} and families <= set(plots._LOOKS)


def test_a_report_is_written_as_page_numbers_and_plots(tmp_path):
    results = [run("imdb", Dense(), 0.9 + 0.01 * seed, seed=seed) for seed in range(3)]
    results += [run("imdb", Smyrf(8, 32), 0.9 + 0.02 * seed, seed=seed) for seed in range(3)]
    results += [run(task, method, 0.7) for task in ("cola", "rte") for method in (Dense(), Smyrf(2, 32))]
    written = write_report(build_tables(results), tmp_path)
    assert sorted(path.name for path in written) == [
        "glue.png", "glue.svg", "imdb.png", "imdb.svg", "report.json", "report.md",
    ]  # fmt: skip
    page = (tmp_path / "report.md").read_text()
    assert "| Smyrf 8×32 | 50% | 92.0 ± 2.0 | +1.0 ± 1.0 | 3 | 92.64 BERT | −1.48 |" in page
    assert "![IMDB](imdb.png)" in page
    numbers = json.loads((tmp_path / "report.json").read_text())
    cell = numbers[1]["rows"][1]["cells"][0]
    assert (cell["mean"], cell["paper"]) == (pytest.approx(92.0), 92.64)
    assert cell["by_seed"] == {"0": 90.0, "1": 92.0, "2": 94.0}


def test_a_report_of_odd_folders_is_written(tmp_path):
    results = [run("rte", Dense(), 0.7), run("rte", Smyrf(2, 32), 0.6, max_length=64), run("cola", Tangent(0.5), 0.1)]
    place = tmp_path / "model" / "checkpoint-3"  # folders of the user's own
    for number, result in enumerate(results):
        result.save(place / f"{number}.run.json", "")
    written = write_report(build_tables(load_results(place)), tmp_path / "report")
    assert [path.name for path in written] == ["report.md", "report.json"]  # no two rows have a task in common
    results = [run("rte", Dense(), 0.7), run("rte", Smyrf(2, 32), 0.6, max_length=64)]
    assert len(write_report(build_tables(results), tmp_path / "report")) == 4


def test_names_of_models_are_shown_as_they_are():
    (table,) = build_tables([run("rte", Dense(), 0.7, model="x/bert[v2]")])
    assert "bert[v2]" in printed(rich_table(table))


def test_tables_fit_a_terminal():
    results = [
        run(task, method, *[0.7] * len(TASKS[task].splits)) for task in TASKS for method in (Dense(), Smyrf(2, 32))
    ]
    long = Smyrf(8, 32, transform="none", hashing="cross_polytope")
    results += [run("imdb", long, 0.8, evaluated=Dense()), run("imdb", Tangent(0.125), 0.8, evaluated=Smyrf(8, 32))]
    for table in build_tables(results):
        if table.name != "glue":  # ten columns
            assert "…" not in printed(rich_table(table), 80)
    presets = list(PRESETS.values())
    text = printed(preset_table(presets), 80) + printed(figure_table(presets), 80)
    assert "…" not in text
    assert all(name in text for name in PRESETS)


def test_results_survive_their_file_and_damaged_ones_are_named(tmp_path):
    result = run("mnli", Smyrf(2, 32), 0.8, 0.7)
    file = tmp_path / "below" / "a.run.json"
    result.save(file, "smyrf finetune mnli")
    assert load_result(file) == result == load_results(tmp_path)[0]
    data = json.loads(file.read_text())
    assert data["command"] == "smyrf finetune mnli" and {"cpu", "torch", "transformers"} <= set(data["machine"])
    (tmp_path / "other.json").write_text("{}")  # not one of ours
    assert len(load_results(tmp_path)) == 1
    for damage, words in (
        ("{", "Expecting"),
        ("[]", "not the result of a run"),
        (json.dumps({**data, "format": 2}), "its format is 2"),
        (json.dumps({**data, "recipe": {**data["recipe"], "epochs": -1}}), "epochs=-1"),
        (json.dumps({name: value for name, value in data.items() if name != "losses"}), "'losses' is missing"),
        (json.dumps({**data, "evaluations": [{**data["evaluations"][0], "metrics": {}}]}), "'accuracy' is missing"),
        (json.dumps(data).replace(": 0.8", ": NaN", 1), "accuracy=nan must be finite"),
    ):
        file.write_text(damage)
        with pytest.raises(ValueError, match=words) as error:
            load_results(tmp_path)
        assert str(file) in str(error.value)
    file.unlink()
    with pytest.raises(ValueError, match="holds no results"):
        load_results(tmp_path)
    assert replace(result, preset="x") != result


def test_grouped_batches_are_other_runs_also_for_dense_attention():
    results = [run("imdb", Dense(), 0.90), run("imdb", Dense(), 0.50, pad="grouped"), run("imdb", Smyrf(8, 32), 0.80)]
    table = by_name(results)["imdb"]
    assert [row.label for row in table.rows] == ["Dense", "Dense, pad=grouped", "Smyrf 8×32, pad=max_length"]
    assert [table.gap(row, IMDB) and round(table.gap(row, IMDB).mean, 6) for row in table.rows][2] == -10.0
    alike = by_name([run("imdb", Dense(), 0.9, pad="grouped"), run("imdb", Smyrf(8, 32), 0.8, pad="grouped")])["imdb"]
    assert [row.label for row in alike.rows] == ["Dense", "Smyrf 8×32"]
    assert "batches of similar lengths" in markdown(alike)


def test_models_of_one_name_and_other_data_are_rows_of_their_own():
    results = [run("imdb", Dense(), 0.9), run("imdb", Dense(), 0.8, weights="n"), run("imdb", Dense(), 0.7, epochs=1.0)]
    results.append(run("imdb", Dense(), 0.6, data="e"))
    table = by_name(results)["imdb"]
    assert sorted(cell.mean for row in table.rows for cell in row.cells.values()) == [60.0, 70.0, 80.0, 90.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"evaluations": []}, "it has no evaluations"),
        ({"n_steps": 1e400}, "cannot convert float infinity"),
        ({"recipe": {**run("imdb", Dense(), 0.9).recipe.to_dict(), "model": 5}}, "a recipe: model=5 must be"),
    ],
)
def test_damaged_results_are_named(tmp_path, change, words):
    file = tmp_path / "a.run.json"
    run("imdb", Dense(), 0.9).save(file, "")
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=f"a.run.json: {words}"):
        load_result(file)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"recipe":' * 100_000, '{"format": ' + "9" * 5000 + "}"])
def test_json_that_no_parser_survives_gives_one_sentence(tmp_path, text):
    (tmp_path / "a.run.json").write_text(text)
    done = CliRunner().invoke(app, ["finetune", "report", str(tmp_path)])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.exception
    assert "a.run.json: " in done.stderr.replace("\n", "") and "Traceback" not in done.output
