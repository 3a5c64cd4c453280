"""The runs behind docs/results.md: MiniLM on IMDB and five GLUE tasks, samples of the large ones, three seeds each.

    python benchmarks/finetune.py DATA OUTPUT [imdb|glue …] [--part 0/2]

DATA holds folders of tasks (imdb/, glue/RTE/, …). Each run is a separate command, printed before it is started;
what is finished is skipped, what was interrupted goes on. With --part i/n every n-th run is done, so that n processes
share the work: on two cores two of one thread each.
"""

from __future__ import annotations

import shlex
import subprocess
import sys

SEEDS = ("0", "1", "2")
IMDB = ["--train-rows", "1200", "--eval-rows", "1000", "--epochs", "1", "--lr", "1e-4", "--pad", "grouped"]
# Presets, or a method where there is none, and with which attention the same model is evaluated. Batches of like
# lengths are shorter than 512 tokens, and a share of them fewer keys than Smyrf visits: Tangent gets a number instead,
# 25 and 12.5% of 512, and of 128 on GLUE.
IMDB_RUNS = {
    "imdb/bert": ("dense", "smyrf:8x32"),
    "imdb/smyrf-8x32": ("smyrf:8x32", "dense"),
    "imdb/smyrf-16x8": (),
    "imdb/smyrf-8x8": (),
    "tangent:128": ("tangent:128", "dense"),
    "tangent:64": ("tangent:64", "dense"),
    "ablation/e2lsh": (),
    "ablation/reformer": (),
}
# Three epochs, as in the paper: after one, CoLA is still answered by its larger class. Its sentences are short; RTE's
# are long, and 1,600 of them taught no more than 800.
GLUE = ["--epochs", "3", "--lr", "1e-4", "--pad", "grouped"]
GLUE_TASKS = {"cola": "3200", "mrpc": "1600", "rte": "800", "stsb": "1600", "sst2": "1600"}
GLUE_RUNS = ("glue/bert-128", "glue/smyrf-2x32", "glue/smyrf-2x16", "tangent:32", "glue/bert-64", "glue/bert-32")


def commands(data: str, output: str, what: list[str]) -> list[list[str]]:
    """All runs, seed by seed, so that an early end leaves whole tables."""
    common = ["--model", "minilm", "--data", data, "--output", output, "--threads", "1", "--no-keep-model"]
    found = []
    for seed in SEEDS:
        if "imdb" in what:
            for preset, methods in IMDB_RUNS.items():
                others = [word for method in methods for word in ("--eval-method", method)]
                found.append(["imdb", *attention("imdb/bert", preset), "--seed", seed, *IMDB, *others, *common])
        if "glue" in what:
            for task, rows in GLUE_TASKS.items():
                how = ["--seed", seed, *GLUE, "--train-rows", rows, *common]
                found += [[task, *attention("glue/bert-128", preset), *how] for preset in GLUE_RUNS]
    return found


def attention(dense: str, preset: str) -> list[str]:
    """A preset, or that of dense attention with another method in its place."""
    return ["--preset", preset] if "/" in preset else ["--preset", dense, "--train-method", preset]


def main() -> None:
    arguments, part = sys.argv[1:], (0, 1)
    if "--part" in arguments:
        place = arguments.index("--part")
        part = tuple(map(int, arguments[place + 1].split("/")))
        if not 0 <= part[0] < part[1]:
            sys.exit(f"--part {arguments[place + 1]} must be one of 0/{part[1]} to {part[1] - 1}/{part[1]}")
        del arguments[place : place + 2]
    if len(arguments) < 2 or set(arguments[2:]) - {"imdb", "glue"}:
        sys.exit(__doc__)
    data, output, *what = arguments
    for command in commands(data, output, what or ["imdb", "glue"])[part[0] :: part[1]]:
        print("smyrf finetune", shlex.join(command), flush=True)
        subprocess.run([sys.executable, "-m", "smyrf", "finetune", *command], check=True)


if __name__ == "__main__":
    main()
