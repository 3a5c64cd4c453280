"""The runs behind docs/results.md: MiniLM on samples of IMDB and of five GLUE tasks, three seeds each.

    python benchmarks/finetune.py DATA OUTPUT [imdb|glue …] [--part 0/2]

DATA holds folders of tasks (imdb/, glue/RTE/, …). Each run is a command of its own, printed before it is started;
what is finished is skipped, what was interrupted goes on. With --part i/n every n-th run is done, so that n processes
share the work: on two cores two of one thread each.
"""

from __future__ import annotations

import shlex
import subprocess
import sys

SEEDS = ("0", "1", "2")
IMDB = ["--train-rows", "1200", "--eval-rows", "1000", "--epochs", "1", "--lr", "1e-4", "--pad", "grouped"]
# Presets, and with which other attention the same model is evaluated as well.
IMDB_RUNS = {
    "imdb/bert": ("dense", "smyrf:8x32"),
    "imdb/smyrf-8x32": ("smyrf:8x32", "dense"),
    "imdb/smyrf-16x8": (),
    "imdb/smyrf-8x8": (),
    "imdb/tangent-25": ("tangent:0.25", "dense"),
    "imdb/tangent-12.5": ("tangent:0.125", "dense"),
    "ablation/e2lsh": (),
    "ablation/reformer": (),
}
GLUE = ["--train-rows", "1600", "--epochs", "1", "--lr", "2e-4"]
GLUE_TASKS = ("cola", "mrpc", "rte", "stsb", "sst2")
# Padding changes nothing for dense attention but its time: padded keys are masked, padded queries are not read.
GLUE_RUNS = {
    "glue/bert-128": ("--pad", "longest"),
    "glue/smyrf-2x32": (),
    "glue/smyrf-2x16": (),
    "glue/tangent-25": (),
    "glue/bert-64": ("--pad", "longest"),
    "glue/bert-32": ("--pad", "longest"),
}


def commands(data: str, output: str, what: list[str]) -> list[list[str]]:
    """All runs: IMDB seed by seed, so that an early end leaves whole tables; GLUE with three seeds at a time."""
    common = ["--model", "minilm", "--data", data, "--output", output, "--threads", "1", "--no-keep-model"]
    found = []
    if "imdb" in what:
        for seed in SEEDS:
            for preset, methods in IMDB_RUNS.items():
                others = [word for method in methods for word in ("--eval-method", method)]
                found.append(["imdb", "--preset", preset, "--seed", seed, *IMDB, *others, *common])
    if "glue" in what:
        seeds = [word for seed in SEEDS for word in ("--seed", seed)]
        for task in GLUE_TASKS:
            for preset, options in GLUE_RUNS.items():
                found.append([task, "--preset", preset, *seeds, *GLUE, *options, *common])
    return found


def main() -> None:
    arguments, part = sys.argv[1:], (0, 1)
    if "--part" in arguments:
        place = arguments.index("--part")
        part = tuple(map(int, arguments[place + 1].split("/")))
        del arguments[place : place + 2]
    if len(arguments) < 2 or set(arguments[2:]) - {"imdb", "glue"}:
        sys.exit(__doc__)
    data, output, *what = arguments
    for command in commands(data, output, what or ["imdb", "glue"])[part[0] :: part[1]]:
        print("smyrf finetune", shlex.join(command), flush=True)
        subprocess.run([sys.executable, "-m", "smyrf.cli", "finetune", *command], check=True)


if __name__ == "__main__":
    main()
