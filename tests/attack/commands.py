"""Every command that writes files, on small inputs, each in a child process that can be killed.

The child is forked from a process that has imported everything, so that a run takes a second, not ten.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.attack.sources import Sources

TRAIN = ("--resolution", "32", "--channels", "2", "--colours", "1", "--latent", "8", "--method", "smyrf:2x32")
TRAIN += ("--batch", "4", "--ema-start", "2", "--log-every", "1", "--save-every", "2", "--grid-every", "4")
SMALL = ("--documents", "2", "--threads", "1", "--length", "24")


@dataclass(frozen=True)
class Writer:
    """A command that writes.

    Args:
        words: the command; {0} is its folder.
        inputs: names of `Sources` that the folder needs.
        outputs: what it writes there.
        resumes: whether a second run goes on where the first was killed.
    """

    words: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    resumes: bool = False


WRITERS = {
    "finetune": Writer(
        (
            *("finetune", "rte", "--model", "{0}/encoder", "--data", "{0}/task", "--output", "{0}/out/runs"),
            *("--max-length", "16", "--batch", "8", "--epochs", "10", "--threads", "1", "--lr", "1e-3"),
            *("--train-method", "smyrf:2x4"),
        ),
        ("encoder", "task"),
        ("out/runs",),
        resumes=True,
    ),
    "biggan train": Writer(
        ("biggan", "train", "{0}/images.npz", *TRAIN, "--steps", "12", "--threads", "1", "--output", "{0}/out/runs"),
        ("images.npz",),
        ("out/runs",),
        resumes=True,
    ),
    "tune": Writer(
        ("tune", "{0}/bert", "--documents", "1", "--length", "64", "--threads", "1", "--json", "{0}/out/a.json"),
        ("bert",),
        ("out/a.json", "out/cache/crossover.json"),
    ),
    "bench": Writer(
        (
            *("bench", "--length", "64", "--n-hashes", "2", "--cluster-size", "16", "--heads", "2", "--width", "8"),
            *("--threads", "1", "--no-memory", "--json", "{0}/out/a.json", "--plot", "{0}/out/p"),
        ),
        (),
        ("out/a.json", "out/p.png", "out/p.svg"),
    ),
    "bench quality": Writer(
        (
            *("bench", "quality", "--qkv", "{0}/qkv.npz", "--no-time", "--no-gradients", "--threads", "1"),
            *("--json", "{0}/out/a.json", "--plot", "{0}/out/p"),
        ),
        ("qkv.npz",),
        ("out/a.json", "out/p.png", "out/p.svg"),
    ),
    "compare": Writer(
        (
            *("compare", "{0}/bert", *SMALL, "--no-memory", "--method", "tangent:0.5", "--method", "smyrf:2x8"),
            *("--json", "{0}/out/a.json", "--plot", "{0}/out/p"),
        ),
        ("bert",),
        ("out/a.json", "out/p.png", "out/p.svg"),
    ),
    "report": Writer(
        (
            *("report", "{0}/bert", *SMALL, "--no-memory", "--methods", "tangent:0.5", "--singular", "0"),
            *("--output", "{0}/out/r.html", "--json", "{0}/out/a.json"),
        ),
        ("bert",),
        ("out/r.html", "out/a.json"),
    ),
    "inspect": Writer(
        (
            *("inspect", "{0}/bert", *SMALL, "--methods", "tangent:0.5", "--singular", "0"),
            *("--json", "{0}/out/a.json", "--output", "{0}/out/plots"),
        ),
        ("bert",),
        ("out/a.json", "out/plots"),
    ),
    "inspect tokens": Writer(
        ("inspect", "tokens", "{0}/bert", "--length", "24", "--json", "{0}/out/a.json"), ("bert",), ("out/a.json",)
    ),
    "biggan sample": Writer(
        (
            *("biggan", "sample", "{0}/g.pth", "--number", "2", "--methods", "dense,smyrf:2x32", "--threads", "1"),
            *("--output", "{0}/out/s", "--json", "{0}/out/a.json"),
        ),
        ("g.pth",),
        ("out/s.png", "out/s.svg", "out/a.json"),
    ),
    "finetune report": Writer(("finetune", "report", "{0}/out/runs"), ("results",), ("out/runs",)),
}


def make_folder(name: str, folder: Path, sources: Sources) -> None:
    """The folder of a command with its inputs, and an empty folder for outputs."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "out").mkdir(parents=True)
    for one in WRITERS[name].inputs:
        if one == "results":
            shutil.copytree(finished_results(sources), folder / "out" / "runs")
            continue
        path = sources(one)
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / one)


def finished_results(sources: Sources) -> Path:
    """A folder with the result of a fine-tuning run."""
    folder = sources.folder / "finished"
    if not folder.exists():
        make_folder("finetune", folder, sources)
        words = (*WRITERS["finetune"].words, "--no-keep-model", "--max-steps", "2")
        code, said = wait(start(words, folder))
        assert code == 0, said
    return folder / "out" / "runs"


@dataclass
class Child:
    """A running command; what it prints goes to a file."""

    pid: int
    log: Path


def start(words: tuple[str, ...], folder: Path, before: Callable[[], None] = lambda: None) -> Child:
    """Fork a child that runs a command in its folder.

    Args:
        before: called in the child first.
    """
    log = folder.with_name(folder.name + ".log")
    pid = os.fork()
    if pid:
        return Child(pid, log)
    code = 70
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ["SMYRF_CACHE"] = str(folder / "out" / "cache")
        before()
        code = _run([word.replace("{0}", str(folder)) for word in words])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(words: list[str]) -> int:
    from smyrf.__main__ import app

    try:
        app(words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def wait(child: Child, seconds: float = 120.0) -> tuple[int, str]:
    """Exit code and what was printed; a negative number is a signal."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), child.log.read_text(errors="replace")
        time.sleep(0.005)
    kill(child)
    return 124, "no end within the time"


def kill(child: Child) -> None:
    """SIGKILL, whether it still runs or not."""
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)


def warm_up() -> None:
    """Import what commands need, so that a forked child does not have to."""
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import plotly  # noqa: F401
    import safetensors.torch  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import transformers

    import smyrf.__main__
    import smyrf.experiments.biggan.train
    import smyrf.experiments.nlp.run_recipes
    import smyrf.tools.bench.command
    import smyrf.tools.compare.command
    import smyrf.tools.inspect.command
    import smyrf.tools.report.findings  # noqa: F401
    from smyrf.tools.bench import roofline
    from smyrf.tools.bench import run as bench_run
    from smyrf.tools.compare import run as compare_run
    from smyrf.tuning import timing

    transformers.Trainer  # noqa: B018, loads it
    bench_run.TIMING_SECONDS = compare_run.TIMING_SECONDS = timing.TIMING_SECONDS = 0.01
    roofline.SIZES = (8, 16)
