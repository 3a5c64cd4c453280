"""Reading and tokenising: `smyrf.experiments.nlp.files`, `data`, `tokens`, `metrics`."""

import gzip
import json

import numpy
import pytest

import tiny

datasets = pytest.importorskip("datasets")

from smyrf.experiments.nlp.data import load_splits  # noqa: E402
from smyrf.experiments.nlp.files import DataError, read_split  # noqa: E402
from smyrf.experiments.nlp.metrics import compute_metrics  # noqa: E402
from smyrf.experiments.nlp.tasks import TASKS, find_task  # noqa: E402
from smyrf.experiments.nlp.tokens import tokenise  # noqa: E402


@pytest.mark.parametrize("name", TASKS)
def test_official_files_of_every_task_are_read(tmp_path, name):
    task = TASKS[name]
    tiny.write_task(tmp_path, name, n_train=30, n_eval=12)
    splits = load_splits(task, tmp_path)
    assert set(splits) == {"train", *task.splits}
    expected = tiny.rows(task, 30)
    if name != "hyperpartisan":
        assert len(splits["train"]) == 30 and all(len(splits[split]) == 12 for split in task.splits)
        assert splits["train"][task.texts[-1]][:] == [row[task.texts[-1]] for row in expected]
        labels = [task.labels.index(row["label"]) if task.labels else float(row["label"]) for row in expected]
        assert splits["train"]["label"][:] == labels
    else:  # the evaluation split is held out: other rows, the same in every run
        again = load_splits(task, tmp_path)
        assert (len(splits["train"]), len(splits["validation"])) == (24, 6)
        assert again["validation"]["text"][:] == splits["validation"]["text"][:]
        assert not set(splits["validation"]["text"]) & set(splits["train"]["text"])


@pytest.mark.parametrize("folder", [".", "..", "../.."])
def test_a_folder_of_tasks_is_as_good_as_the_folder_of_a_task(tmp_path, folder):
    tiny.write_task(tmp_path / "glue", "rte")
    given = (tmp_path / "glue" / "RTE" / folder).resolve()
    assert len(load_splits(TASKS["rte"], given)["train"]) == 32


@pytest.mark.parametrize("ending", ["tsv", "csv", "jsonl", "jsonl.gz", "csv.gz", "parquet"])
def test_formats_hold_the_same_rows(tmp_path, ending):
    task = TASKS["mrpc"]
    some = tiny.rows(task, 10)
    some[0]["sentence1"] = 'a "quoted" word, and a comma'
    file = tmp_path / f"train.{ending}"
    if ending == "parquet":
        datasets.Dataset.from_list(some).to_parquet(str(file))
    else:
        if ending.startswith("jsonl"):
            text = "".join(json.dumps(row) + "\n" for row in some)
        elif ending.startswith("csv"):
            quoted = [[f'"{value.replace(chr(34), 2 * chr(34))}"' for value in row.values()] for row in some]
            text = "\n".join(",".join(line) for line in [list(some[0]), *quoted])
        else:
            text = "\n".join("\t".join(line) for line in [list(some[0]), *(row.values() for row in some)])
        file.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    found = read_split(file, task)
    assert found["sentence1"] == [row["sentence1"] for row in some]
    assert found["label"] == [task.labels.index(row["label"]) for row in some]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.tsv", "index\tsentence1\tlabel\n0\ta\tentailment\n", "line 2 has no column 'sentence2'"),
        ("train.tsv", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\n", "line 2 has 3 fields instead of 4"),
        ("train.tsv", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tperhaps\n", "label='perhaps' must be one of ent"),
        ("train.tsv", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t2\n", "label='2' must be one of entailment"),
        ("train.tsv", "", "holds no rows"),
        ("train.csv", "sentence1,sentence2,label\na,b,-1\n", "line 2: label='-1' must be one of"),
        ("train.jsonl", '{"sentence1": "a", "sentence2": "b", "label": 0}\n{"sent', "line 2 is not JSON"),
        ("train.jsonl", "[1]\n", "line 1 is not an object"),
        ("train.jsonl", '{"sentence1": 3, "sentence2": "b", "label": 0}\n', "line 1: sentence1=3 must be text"),
        ("train.jsonl", '{"sentence1": "a", "sentence2": "b"}\n', "line 1 has no column 'label'"),
        ("train.jsonl", '{"sentence1": "a", "sentence2": "b", "label": 0.5}\n', "label=0.5 must be one of"),
        ("train.jsonl", '{"sentence1": "a", "sentence2": "b", "label": NaN}\n', "line 1: label=nan must be one of"),
        (
            "train.jsonl",
            '{"sentence1": "a", "sentence2": "b", "label": Infinity}\n',
            "line 1: label=inf must be one of",
        ),
        ("train.jsonl", '{"sentence1": "a", "sentence2": "\\ud800", "label": 0}\n', "line 1: sentence2 holds half of"),
        ("train.csv", "sentence1,sentence2,label,label\na,b,0,1\n", "line 1 has the column 'label' twice"),
        ("train.parquet", "no parquet", "cannot be read"),
        ("train.jsonl.gz", "no gzip", "cannot be read"),
    ],
)
def test_a_damaged_file_is_named_with_the_line(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as error:
        read_split(tmp_path / name, TASKS["rte"])
    assert words in str(error.value) and str(tmp_path / name) in str(error.value)


def test_wrong_encodings_damaged_archives_and_two_files_are_named(tmp_path):
    task, file = TASKS["rte"], tmp_path / "train.csv"
    file.write_bytes("sentence1,sentence2,label\na,b,0\ncafé,b,0\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"train\.csv: line 3 is not UTF-8"):
        read_split(file, task)
    packed = bytearray(gzip.compress(json.dumps({"sentence1": "a" * 500, "sentence2": "b", "label": 0}).encode()))
    packed[20:24] = b"\xff" * 4
    (tmp_path / "train.jsonl.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"train\.jsonl\.gz cannot be read"):
        read_split(tmp_path / "train.jsonl.gz", task)
    with pytest.raises(DataError, match=r"train\.csv and .*train\.jsonl\.gz could both be the train split"):
        load_splits(task, tmp_path)


def test_lines_that_are_broken_in_the_official_file_are_left_out_and_counted(tmp_path):
    file = tmp_path / "train.tsv"
    file.write_text("id\tquestion1\tquestion2\tis_duplicate\n0\ta\tb\t1\n1\ta\n2\tc\td\t0\n")
    with pytest.warns(UserWarning, match="1 lines with too few fields"):
        assert read_split(file, TASKS["qqp"])["label"] == [1, 0]


@pytest.mark.parametrize(("label", "number"), [("True", 1), (" 0 ", 0), ("1.0", 1), (True, 1), (0.0, 0), ("false", 0)])
def test_labels_are_read_however_they_are_written(tmp_path, label, number):
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "a", "label": label}))
    assert read_split(tmp_path / "train.jsonl", TASKS["hyperpartisan"])["label"] == [number]


def test_too_few_rows_to_hold_some_out_are_refused(tmp_path):
    tiny.write_task(tmp_path, "hyperpartisan", n_train=3)
    with pytest.raises(DataError, match="3 rows are too few to hold some out"):
        load_splits(TASKS["hyperpartisan"], tmp_path)


@pytest.mark.parametrize("label", ["nan", "inf", "much", "", True])
def test_a_score_must_be_a_finite_number(tmp_path, label):
    (tmp_path / "train.jsonl").write_text(json.dumps({"sentence1": "a", "sentence2": "b", "score": label}))
    with pytest.raises(DataError, match="must be a score"):
        read_split(tmp_path / "train.jsonl", TASKS["stsb"])


def test_a_missing_split_is_said_with_the_places_that_were_searched(tmp_path):
    tiny.write_task(tmp_path, "rte")
    (tmp_path / "RTE" / "dev.tsv").unlink()
    with pytest.raises(DataError, match=r"no validation split of RTE: dev\.\* or validation\.\*"):
        load_splits(TASKS["rte"], tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        load_splits(TASKS["rte"], tmp_path / "nowhere")


def test_a_sample_is_the_same_in_every_run(tmp_path):
    tiny.write_task(tmp_path, "cola", n_train=50, n_eval=20)
    first, again = (load_splits(TASKS["cola"], tmp_path, n_train=10, n_eval=5) for _ in range(2))
    assert first["train"]["sentence"][:] == again["train"]["sentence"][:]
    assert (len(first["train"]), len(first["validation"])) == (10, 5)
    with pytest.raises(DataError, match="n_train=51 is more than the 50 rows"):
        load_splits(TASKS["cola"], tmp_path, n_train=51)


def test_the_hub_is_asked_for_what_the_task_names(monkeypatch):
    asked = []

    def load_dataset(name, configuration, data_dir, revision):
        asked.append((name, configuration, data_dir, revision))
        columns = {"text": ["a", "b", "c", "d", "e"], "hyperpartisan": [True, False, True, False, True]}
        return datasets.DatasetDict(train=datasets.Dataset.from_dict(columns))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    splits = load_splits(TASKS["hyperpartisan"], None)
    assert asked == [("SemEvalWorkshop/hyperpartisan_news_detection", None, "byarticle", "refs/convert/parquet")]
    assert (len(splits["train"]), len(splits["validation"])) == (4, 1)
    assert sorted([*splits["train"]["label"], *splits["validation"]["label"]]) == [0, 0, 1, 1, 1]

    def unlabelled(name, configuration, data_dir, revision):
        rows = datasets.Dataset.from_dict({"sentence": ["a"], "label": [-1]})
        return datasets.DatasetDict(train=rows, validation=rows)

    monkeypatch.setattr(datasets, "load_dataset", unlabelled)
    with pytest.raises(DataError, match="rows without a label"):
        load_splits(TASKS["sst2"], None)
    with pytest.raises(DataError, match="has no column 'premise'"):
        load_splits(TASKS["mnli"], None)


def test_token_ids_are_kept_and_made_anew_when_anything_changes(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.save_encoder(tmp_path / "model"))
    task, kept = TASKS["mrpc"], tmp_path / "kept"
    rows = load_splits(task, tiny.write_task(tmp_path, "mrpc"))["train"]
    first = tokenise(rows, tokenizer, task, 16, kept)
    files = set(kept.iterdir())
    assert len(files) == 1 and max(map(len, first["input_ids"])) <= 16
    again = tokenise(rows, tokenizer, task, 16, kept)
    assert set(kept.iterdir()) == files and again["input_ids"][:] == first["input_ids"][:]
    assert again.cache_files[0]["filename"] == str(next(iter(files)))
    (file,) = files
    whole, ids = file.read_bytes(), first["input_ids"][:]
    file.write_bytes(whole[: len(whole) // 2])  # a full disk
    assert tokenise(rows, tokenizer, task, 16, kept)["input_ids"][:] == ids
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    assert "token_type_ids" not in tokenise(rows, tokenizer, task, 16, kept).column_names
    tokenise(rows, tokenizer, task, 12, kept)
    tokenise(rows.select(range(5)), tokenizer, task, 16, kept)
    tokenizer.add_tokens(["film story"])
    tokenise(rows, tokenizer, task, 16, kept)
    assert len(set(kept.iterdir())) == 5


def test_metrics_are_the_official_ones():
    labels, logits = numpy.array([0, 1, 1, 0, 1]), numpy.eye(2)[[0, 1, 0, 1, 1]]
    found = compute_metrics(["accuracy", "f1", "matthews"], labels, logits)
    # 2 true positives, 1 false positive, 1 false negative, 1 true negative
    assert found == pytest.approx({"accuracy": 3 / 5, "f1": 2 / 3, "matthews": (2 * 1 - 1 * 1) / 6})
    scores, predictions = numpy.array([1.0, 2.0, 4.0]), numpy.array([[1.0], [3.0], [4.0]])
    found = compute_metrics(["pearson", "spearman"], scores, predictions)
    assert found == pytest.approx({"pearson": numpy.corrcoef(scores, predictions[:, 0])[0, 1], "spearman": 1.0})
    assert compute_metrics(["pearson", "spearman"], scores, numpy.ones((3, 1))) == {"pearson": 0.0, "spearman": 0.0}
    # A row that is not finite is wrong, the others count as they are.
    logits = numpy.where(numpy.arange(5)[:, None] == 0, numpy.nan, numpy.eye(2)[labels])
    assert compute_metrics(["accuracy", "f1"], labels, logits) == pytest.approx({"accuracy": 0.8, "f1": 6 / 7})
    assert compute_metrics(["pearson"], scores, numpy.array([[1.0], [numpy.inf], [4.0]])) == {"pearson": 0.0}


def test_tasks_are_found_however_they_are_spelled():
    assert find_task("STS-B") is find_task("sts_b") is TASKS["stsb"]
    with pytest.raises(ValueError, match="task='boolq' must be one of cola"):
        find_task("boolq")


def test_two_columns_that_could_be_one_are_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "label": 0, "Quality": 1}\n')
    with pytest.raises(DataError, match="two columns that could be 'label', one of them 'Quality'"):
        read_split(tmp_path / "train.jsonl", TASKS["mrpc"])


def test_splits_of_different_folders_are_not_mixed(tmp_path):
    rows = '{"sentence": "a", "label": 0}\n{"sentence": "b", "label": 1}\n'
    (tmp_path / "SST-2").mkdir()
    (tmp_path / "SST-2" / "train.jsonl").write_text(rows)
    (tmp_path / "dev.jsonl").write_text(rows)
    with pytest.raises(DataError, match="in different folders"):
        load_splits(TASKS["sst2"], tmp_path)
