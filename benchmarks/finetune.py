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
GLUE = ["--epochs", "1", "--lr", "1e-4", "--pad", "grouped"]
GLUE_TASKS = {"cola": (), "mrpc": (), "rte": (), "stsb": (), "sst2": ("--train-rows", "3200")}
GLUE_RUNS = ("glue/bert-128", "glue/smyrf-2x32", "glue/smyrf-2x16", "glue/tangent-25", "glue/bert-64", "glue/bert-32")
# No row of these has more than 64 tokens: to cut there is to do the same again.
SHORT_TASKS = ("cola", "sst2")


def commands(data: str, output: str, what: list[str]) -> list[list[str]]:
    """All runs, seed by seed, so that an early end leaves whole tables."""
    common = ["--model", "minilm", "--data", data, "--output", output, "--threads", "1", "--no-keep-model"]
    found = []
    for seed in SEEDS:
        if "imdb" in what:
            for preset, methods in IMDB_RUNS.items():
                others = [word for method in methods for word in ("--eval-method", method)]
                found.append(["imdb", "--preset", preset, "--seed", seed, *IMDB, *others, *common])
        if "glue" in what:
            for task, rows in GLUE_TASKS.items():
                for preset in GLUE_RUNS:
                    if not (preset == "glue/bert-64" and task in SHORT_TASKS):
                        found.append([task, "--preset", preset, "--seed", seed, *GLUE, *rows, *common])
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
