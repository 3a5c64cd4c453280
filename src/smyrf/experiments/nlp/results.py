"""The result of a run, as a JSON file that holds all that is needed to repeat it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from smyrf.atomic_write import write_json
from smyrf.experiments.nlp.recipe import InputHashes, Recipe
from smyrf.experiments.nlp.tasks import TASKS
from smyrf.methods import Method, method_from_dict
from smyrf.tuning.machine import machine

FORMAT = 1


@dataclass(frozen=True)
class Evaluation:
    """Metrics of the trained model on one split with one method.

    Args:
        metrics: metrics as fractions; the first is the task's main metric.
    """

    method: Method
    split: str
    n_rows: int
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class Result:
    """A finished run.

    Args:
        inputs: hashes of data and model.
        preset: name of the paper's row that was run, or "".
        n_steps: optimisation steps.
        n_rows: rows of the training split.
        losses: pairs of a step and the mean training loss since the previous one.
        seconds: training time; None for a run that was interrupted.
        n_processes: processes that ran it.
    """

    recipe: Recipe
    evaluations: tuple[Evaluation, ...]
    inputs: InputHashes
    preset: str
    n_steps: int
    n_rows: int
    losses: tuple[tuple[int, float], ...]
    seconds: float | None
    threads: int
    n_processes: int

    def save(self, path: Path, command: str) -> None:
        """Write the result with the command, the machine and the versions."""
        from importlib.metadata import version

        evaluations = [{**asdict(one), "method": one.method.to_dict()} for one in self.evaluations]
        versions = {name: version(name) for name in ("transformers", "datasets", "accelerate", "scikit-learn")}
        data = {
            "format": FORMAT,
            "command": command,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": {**machine(), **versions},
            "recipe": self.recipe.to_dict(),
            "inputs": self.inputs._asdict(),
            "evaluations": evaluations,
        }
        for name in ("preset", "n_steps", "n_rows", "losses", "seconds", "threads", "n_processes"):
            data[name] = getattr(self, name)
        write_json(path, data)


def load_result(path: Path) -> Result:
    """Read what `Result.save` wrote.

    Raises:
        ValueError: the file is not a valid result.
    """
    try:
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or "recipe" not in data or "evaluations" not in data:
            raise ValueError("it is not the result of a run")
        if data.get("format") != FORMAT:
            raise ValueError(f"its format is {data.get('format')!r}, not {FORMAT}")
        recipe = Recipe.from_dict(data["recipe"])
        evaluations = tuple(_load_evaluation(one, recipe) for one in data["evaluations"])
        if not evaluations:
            raise ValueError("it has no evaluations")
        return Result(
            recipe=recipe,
            evaluations=evaluations,
            inputs=InputHashes(str(data["inputs"]["data"]), str(data["inputs"]["model"])),
            preset=str(data["preset"]),
            n_steps=int(data["n_steps"]),
            n_rows=int(data["n_rows"]),
            losses=tuple((int(step), float(loss)) for step, loss in data["losses"]),
            seconds=None if data["seconds"] is None else float(data["seconds"]),
            threads=int(data["threads"]),
            n_processes=int(data["n_processes"]),
        )
    except RecursionError as error:
        raise ValueError(f"{path}: it is nested too deeply to be the result of a run") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: {what}") from error


def _load_evaluation(data: dict[str, Any], recipe: Recipe) -> Evaluation:
    metrics = {str(name): float(value) for name, value in data["metrics"].items()}
    for name in TASKS[recipe.task].metrics:
        if not math.isfinite(metrics[name]):
            raise ValueError(f"{name}={metrics[name]} must be finite")
    if data["split"] not in TASKS[recipe.task].splits:
        raise ValueError(f"split={data['split']!r} must be one of {', '.join(TASKS[recipe.task].splits)}")
    method = method_from_dict(data["method"])
    return Evaluation(method, str(data["split"]), int(data["n_rows"]), metrics, float(data["seconds"]))


def load_results(folder: Path) -> list[Result]:
    """Read all results in a folder and its subfolders, sorted by name.

    Raises:
        ValueError: there are none, or one is invalid.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    found = [load_result(path) for path in sorted(folder.rglob(f"*{SUFFIX}"))]
    if not found:
        raise ValueError(f"{folder} holds no results of smyrf finetune (files named *{SUFFIX})")
    return found


# Distinguishes results from other JSON files, such as a checkpoint's.
SUFFIX = ".run.json"
