"""Malicious and damaged files for every command that reads one.

The promise: another exit code than 0 with one sentence on standard error, no traceback, and no code of the file is run.
Damage that leaves a valid file may pass.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.attack import damages
from tests.attack.sources import Sources
from tests.attack.verdict import Case, Verdict

PROCESSES, SECONDS, HANG_SECONDS = 2, 120.0, 45
SMALL = ("--documents", "2", "--threads", "1")
COMPARE = (*SMALL, "--no-memory", "--method", "tangent:0.5")
BIGGAN = ("--resolution", "32", "--channels", "2", "--colours", "1", "--latent", "8", "--method", "smyrf:2x32")
BIGGAN += ("--batch", "4", "--ema-start", "2", "--threads", "1", "--log-every", "1", "--save-every", "2")


@dataclass(frozen=True)
class Reader:
    """A command and the file that it reads.

    Args:
        words: the command; {0} is the folder in which everything lies.
        file: the file to damage, in that folder.
        inputs: names of `Sources` that are copied into the folder.
        kinds: damages that make sense for the file.
        passes: whether any damage may pass, because the file is optional.
        setup: runs in the folder before.
    """

    words: tuple[str, ...]
    file: str
    inputs: tuple[str, ...]
    kinds: tuple[dict[str, Any], ...] = (damages.ANY,)
    passes: bool = False
    setup: Callable[[Path], None] | None = None


def _read_plan(words: list[str]) -> None:
    from smyrf.models.plan import Plan

    print(Plan.load(words[0]))


def _half_trained(folder: Path) -> None:
    """A run of BigGAN with two checkpoints."""
    _invoke(["biggan", "train", f"{folder}/images.npz", *BIGGAN, "--steps", "4", "--output", f"{folder}/runs"])
    (run,) = (folder / "runs").iterdir()
    run.rename(folder / "run")  # a name that is known
    (folder / "runs" / run.name).symlink_to("../run")


def _half_tuned(folder: Path) -> None:
    """A fine-tuning run that was interrupted after a checkpoint."""
    from smyrf.experiments.nlp.checkpoints import MarkWhole

    def interrupt(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 13:
            raise KeyboardInterrupt

    MarkWhole.on_step_end = interrupt
    try:
        _invoke([word.format(folder) for word in FINETUNE])
    finally:
        del MarkWhole.on_step_end
    (run,) = (path for path in (folder / "runs").iterdir() if path.is_dir())
    run.rename(folder / "run")
    (folder / "runs" / run.name).symlink_to("../run")


def _converted(suffix: str) -> Callable[[Path], None]:
    """The training split of a task in another format."""

    def convert(folder: Path) -> None:
        file = folder / "task/RTE/train.tsv"
        text, path = file.read_text(), file.with_name(f"train{suffix}")
        rows = list(csv.DictReader(text.splitlines(), delimiter="\t"))
        if suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif suffix == ".csv":
            path.write_text(text.replace(",", " ").replace("\t", ","))
        elif suffix == ".tsv.gz":
            path.write_bytes(gzip.compress(text.encode()))
        elif suffix == ".parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        if path != file:
            file.unlink()

    return convert


def _only(file: str) -> Callable[[Path], None]:
    """Leaves one file of a folder."""

    def remove(folder: Path) -> None:
        for path in (folder / file).parent.iterdir():
            if path != folder / file:
                path.unlink()

    return remove


def _a_result(folder: Path) -> None:
    _invoke([word.format(folder) for word in FINETUNE] + ["--no-keep-model"])
    (file,) = (folder / "runs").glob("*.run.json")
    file.rename(folder / "runs" / "a.run.json")


FINETUNE = ("finetune", "rte", "--model", "{0}/encoder", "--data", "{0}/task", "--output", "{0}/runs")
FINETUNE += ("--max-length", "16", "--batch", "8", "--epochs", "5", "--threads", "1", "--lr", "1e-3")
JSON = (damages.ANY, damages.OBJECT)


def readers() -> dict[str, Reader]:
    """Every command with every kind of file that it reads."""
    found = {}
    commands = {
        "compare": ("compare", *COMPARE),
        "inspect": ("inspect", *SMALL, "--methods", "tangent:0.5", "--singular", "0"),
        "report": (
            "report",
            *SMALL,
            "--methods",
            "tangent:0.5",
            "--no-memory",
            "--singular",
            "0",
            "--output",
            "{0}/r.html",
        ),
        "inspect tokens": ("inspect", "tokens"),
    }
    of_text = {
        "a.txt": (damages.NAMED, damages.TEXT),
        "a.jsonl": (damages.NAMED, damages.TEXT, damages.OBJECT),
        "a.txt.gz": (damages.NAMED, damages.GZIP),
        "a.jsonl.gz": (damages.NAMED, damages.GZIP),
    }
    for name, words in commands.items():
        for file, kinds in of_text.items() if name == "compare" else [("a.txt", of_text["a.txt"])]:
            all_words = (*words, "{0}/bert", "--text", f"{{0}}/texts/{file}", "--length", "24")
            found[f"{name} --text {file}"] = Reader(all_words, f"texts/{file}", ("bert", "texts"), kinds)
    of_folder = {
        "compare --images": ((*commands["compare"], "{0}/vit", "--images", "{0}/images"), "images/a.png", "vit"),
        "inspect clusters --images": (
            ("inspect", "clusters", "{0}/vit", "--images", "{0}/images", "--number", "1", "--output", "{0}/c"),
            "images/a.png",
            "vit",
        ),
        "compare --audio": (
            (*commands["compare"], "{0}/wav2vec2", "--audio", "{0}/sounds"),
            "sounds/a.wav",
            "wav2vec2",
        ),
    }
    for name, (words, file, model) in of_folder.items():
        found[name] = Reader(words, file, (model, file.split("/")[0]), setup=_only(file))

    of_model = {
        "config.json": (JSON, False),
        "model.safetensors": ((damages.ANY, damages.TENSORS), False),
        "tokenizer.json": (JSON, False),
        "tokenizer_config.json": (JSON, True),
    }
    models = {
        "compare": (*commands["compare"], "{0}/bert", "--length", "24"),
        "tune": ("tune", "{0}/bert", "--documents", "1", "--length", "24", "--threads", "1"),
        "inspect": (*commands["inspect"], "{0}/bert", "--length", "24"),
        "report": (*commands["report"], "{0}/bert", "--length", "24"),
        "bench quality": (
            *("bench", "quality", "--model", "{0}/bert", "--length", "80", "--documents", "1", "--budget", "64"),
            *("--no-time", "--no-gradients", "--threads", "1"),
        ),
    }
    for name, words in models.items():
        for file, (kinds, passes) in of_model.items():
            some = kinds if name in ("compare", "tune") else (damages.ANY,)
            found[f"{name} {file}"] = Reader(words, f"bert/{file}", ("bert",), some, passes)
    for file in ("config.json", "preprocessor_config.json"):
        found[f"compare images {file}"] = Reader(
            (*commands["compare"], "{0}/vit"), f"vit/{file}", ("vit",), JSON, passes=file != "config.json"
        )
    found["compare pytorch_model.bin"] = Reader(
        models["compare"],
        "bert/pytorch_model.bin",
        ("bert",),
        (damages.ANY, damages.WEIGHTS),
        setup=lambda folder: (folder / "bert/model.safetensors").unlink(),
    )

    for suffix, kinds in (("npz", (damages.NAMED, damages.ARRAYS)), ("safetensors", (damages.NAMED, damages.TENSORS))):
        words = ("bench", "quality", "--qkv", f"{{0}}/qkv.{suffix}", "--no-time", "--no-gradients", "--threads", "1")
        found[f"bench quality --qkv .{suffix}"] = Reader(words, f"qkv.{suffix}", (f"qkv.{suffix}",), kinds)
    sample = {
        "biggan sample": ("biggan", "sample", "{0}/{1}", "--number", "2", "--output", "{0}/s"),
        "inspect biggan": (
            "inspect",
            "biggan",
            "{0}/{1}",
            "--number",
            "2",
            "--methods",
            "tangent:0.5",
            "--singular",
            "0",
        ),
        "inspect clusters": ("inspect", "clusters", "{0}/{1}", "--number", "2", "--output", "{0}/c"),
    }
    of_weights = {"g.pth": (damages.NAMED, damages.WEIGHTS), "g.safetensors": (damages.NAMED, damages.TENSORS)}
    for name, words in sample.items():
        for file, kinds in of_weights.items():
            found[f"{name} {file}"] = Reader(tuple(word.replace("{1}", file) for word in words), file, (file,), kinds)
    score = ("biggan", "score", "{0}/g.pth", "--features", "{0}/features.pt", "--number", "4", "--batch", "2")
    found["biggan score --features"] = Reader(
        score, "features.pt", ("g.pth", "features.pt"), (damages.NAMED, damages.WEIGHTS)
    )
    for what, file in (("npz", "images.npz"), ("folder", "images/a.png")):
        source = file.split("/")[0]
        kinds = (damages.NAMED, damages.ARRAYS) if what == "npz" else (damages.ANY,)
        train = ("biggan", "train", f"{{0}}/{source}", *BIGGAN, "--steps", "2", "--output", "{0}/runs")
        setup = None if what == "npz" else _only(file)
        found[f"biggan train {what}"] = Reader(train, file, (source,), kinds, setup=setup)
    resume = ("biggan", "train", "{0}/images.npz", *BIGGAN, "--steps", "6", "--output", "{0}/runs")
    of_run = {
        "state.json": JSON,
        "optimizers.pt": (damages.ANY, damages.WEIGHTS),
        "generator.safetensors": (damages.ANY, damages.TENSORS),
    }
    for file, kinds in of_run.items():
        where = f"run/checkpoint-4/{file}"
        found[f"biggan train, resumed {file}"] = Reader(resume, where, ("images.npz",), kinds, setup=_half_trained)

    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        kinds = JSON if file.endswith("json") else (damages.ANY, damages.TENSORS)
        words = (*FINETUNE, "--max-steps", "1", "--no-keep-model")
        found[f"finetune {file}"] = Reader(words, f"encoder/{file}", ("encoder", "task"), kinds)
    words = (*FINETUNE, "--max-steps", "1", "--no-keep-model")
    for suffix in (".tsv", ".csv", ".jsonl", ".parquet", ".tsv.gz"):
        kinds = (damages.ANY, damages.TEXT if "tsv" in suffix else damages.OBJECT if suffix == ".jsonl" else {})
        found[f"finetune --data {suffix}"] = Reader(
            words, f"task/RTE/train{suffix}", ("encoder", "task"), kinds, setup=_converted(suffix)
        )
    for file in ("model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth", "training_args.bin"):
        kinds = JSON if file.endswith("json") else (damages.ANY, damages.WEIGHTS)
        found[f"finetune, resumed {file}"] = Reader(
            FINETUNE,
            f"run/checkpoint-10/{file}",
            ("encoder", "task"),
            kinds,
            passes=file == "training_args.bin",
            setup=_half_tuned,
        )
    found["finetune report"] = Reader(
        ("finetune", "report", "{0}/runs", "--no-plots"), "runs/a.run.json", ("encoder", "task"), JSON, setup=_a_result
    )
    found["tune, cached times"] = Reader(models["tune"], "cache/crossover.json", ("bert",), JSON, passes=True)
    found["Plan.load"] = Reader(("{0}/plan.json",), "plan.json", ("plan.json",), JSON)
    return found


def cases(seed: int, n_cases: int | None) -> Iterator[Case]:
    """Every damage of every file; `n_cases` of them, drawn with the seed."""
    found = [
        {"kind": name, "damage": damage}
        for name, reader in readers().items()
        for kind in reader.kinds
        for damage in kind
    ]
    if n_cases is not None and n_cases < len(found):
        found = random.Random(seed).sample(found, n_cases)
    yield from found


class Hang(BaseException):
    """A command takes too long."""


def _hang(*_: object) -> None:
    raise Hang


_folder = Path()


def prepare(folder: Path) -> None:
    """Where inputs are made, and short measurements."""
    global _folder
    _folder = folder
    os.environ["SMYRF_CACHE"] = str(folder / "cache")
    from smyrf.tools.compare import run
    from smyrf.tuning import timing

    run.TIMING_SECONDS = timing.TIMING_SECONDS = 0.01


@cache
def _ready(name: str, folder: Path) -> Path:
    """The inputs of a reader, set up once, at the path where they are used: names of runs depend on it."""
    reader, work, ready = readers()[name], folder / "work", folder / "ready" / name.replace("/", " ")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for source in reader.inputs:
        path = Sources(folder / "sources")(source)
        (shutil.copytree if path.is_dir() else shutil.copy)(path, work / source)
    if reader.setup is not None:
        reader.setup(work)
    ready.parent.mkdir(exist_ok=True)
    work.rename(ready)
    return ready


def check(case: Case) -> Verdict:
    """Damage a file and run the command that reads it."""
    from smyrf.tuning import timing

    reader = readers()[case["kind"]]
    damage = next(kind[case["damage"]] for kind in reader.kinds if case["damage"] in kind)
    ready, work, marker = _ready(case["kind"], _folder), _folder / "work", _folder / "marker"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(ready, work, symlinks=True)
    marker.unlink(missing_ok=True)
    path = work / reader.file
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() and case["damage"].startswith("all "):
        path.write_text('{"x": [1.5, 2], "y": [1, 1]}')
    damage(path, marker)
    os.environ["SMYRF_CACHE"] = str(work / "cache")
    timing._remembered.clear()
    words = [word.replace("{0}", str(work)) for word in reader.words]
    failures = []
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(HANG_SECONDS)
    try:
        code, said, error = _load(words) if case["kind"] == "Plan.load" else _invoke(words)
    except Hang:
        code, said, error = 1, "", f"no end within {HANG_SECONDS} seconds"
    finally:
        signal.alarm(0)
    if error is not None:
        failures.append(f"a traceback: {error}")
    elif code:
        lines = [line for line in said.splitlines() if line.strip() and "it/s]" not in line and "s/it]" not in line]
        if len(lines) != 1:
            failures.append(f"{len(lines)} lines instead of one sentence: {said[:300]!r}")
        elif "weights_only" in said and "False" in said:
            failures.append(f"advises to trust the file: {said[:300]!r}")
    elif case["damage"] in damages.MUST_REFUSE and not reader.passes:
        failures.append("accepted")
    if case["kind"] == "tune, cached times" and code:
        failures.append(f"a cache that cannot be read must count as empty: {said[:200]!r}")
    if marker.exists():
        failures.append("code of the file was run")
    return Verdict(tuple(f"{case['kind']}, {case['damage']}: {one}" for one in failures))


def _invoke(words: list[str]) -> tuple[int, str, str | None]:
    """Exit code, standard error, and the exception that would have been a traceback."""
    from typer.testing import CliRunner

    from smyrf.__main__ import app

    done = CliRunner().invoke(app, words)
    error = done.exception
    if isinstance(error, Hang):
        raise error
    if error is None or isinstance(error, SystemExit):
        return done.exit_code, done.stderr, None
    return done.exit_code, done.stderr, f"{type(error).__name__}: {str(error)[:200]}"


def _load(words: list[str]) -> tuple[int, str, str | None]:
    """As `_invoke`, for the one file that only Python reads: a ValueError or OSError with one line is its sentence."""
    try:
        _read_plan(words)
    except (ValueError, OSError) as error:
        return 2, str(error), None
    except Exception as error:
        return 1, "", f"{type(error).__name__}: {str(error)[:200]}"
    return 0, "", None
