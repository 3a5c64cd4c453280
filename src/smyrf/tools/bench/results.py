"""Results of a run, with what is needed to repeat it, as JSON."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch

import smyrf
from smyrf.atomic_write import write_json
from smyrf.methods import Smyrf, Tangent
from smyrf.tools.bench.cases import Problem
from smyrf.tools.bench.contenders import EAGER, SDPA
from smyrf.tools.bench.roofline import flops
from smyrf.tuning.machine import cpu


@dataclass(frozen=True)
class Measurement:
    """One contender on one problem.

    Args:
        seconds: best time of a call, or None if it was not run.
        extra_bytes: peak memory beyond the inputs, or None if it was not measured.
        skipped: why it was not run, or None.
        backend: kernel that was asked for, or None.
        gemm_gflops: rate of large matrix products in the same turns, or None if it was not measured.
    """

    problem: Problem
    name: str
    method: Smyrf | Tangent | None
    seconds: float | None = None
    extra_bytes: int | None = None
    skipped: str | None = None
    backend: str | None = None
    gemm_gflops: float | None = None

    @property
    def label(self) -> str:
        """The name with the rounds and the cluster size, or with the budget; and with the kernel if one was asked for.

        Example:
            >>> problem = Problem(1, 4, 1024, 64, "float32", False)
            >>> Measurement(problem, "smyrf", Smyrf(4, 64)).label
            'smyrf 4×64'
            >>> Measurement(problem, "tangent", Tangent(256, levels=2)).label
            'tangent 256, 2 levels'
            >>> Measurement(problem, "smyrf", Smyrf(4, 64), backend="torch").label
            'smyrf 4×64 · torch'
        """
        kernel = "" if self.backend is None else f" · {self.backend}"
        if isinstance(self.method, Smyrf):
            return f"{self.name} {self.method.n_hashes}×{self.method.cluster_size}{kernel}"
        if isinstance(self.method, Tangent):
            levels = (
                "" if self.method.levels is None else f", {self.method.levels} level{'s' * (self.method.levels > 1)}"
            )
            return f"{self.name} {self.method.budget}{levels}{kernel}"
        return self.name

    @property
    def times_gemm_bound(self) -> float | None:
        """Time as a multiple of what its matrix products alone would take, at the machine's rate in large ones.

        The operations are those of `roofline.flops`: 2 · batch · heads · N · key visits · (D + E) forward, 3.5
        times that forward and backward. None for baselines, in half precision, and for what was not run.

        Example:
            >>> problem = Problem(1, 4, 1024, 64, "float32", False)
            >>> Measurement(problem, "smyrf", Smyrf(4, 64), 0.008, gemm_gflops=67.108864).times_gemm_bound
            2.0
        """
        if self.method is None or self.name == EAGER or self.seconds is None or self.gemm_gflops is None:
            return None
        return self.seconds / (flops(self.problem, self.method) / (self.gemm_gflops * 1e9))


def baseline(measurements: list[Measurement], one: Measurement, name: str) -> Measurement | None:
    """The measurement of a baseline on the same problem, and for the same method where it has one."""
    for other in measurements:
        if other.problem == one.problem and other.name == name and other.method in (None, one.method):
            return other
    return None


def speedup(measurements: list[Measurement], one: Measurement, over: str = SDPA) -> float | None:
    """How many times faster than a baseline, if both were run."""
    other = baseline(measurements, one, over)
    return other.seconds / one.seconds if other and other.seconds and one.seconds else None


def speedup_over_backend(measurements: list[Measurement], one: Measurement, over: str = "torch") -> float | None:
    """How many times faster than the same method on another kernel, if both were run."""
    for other in measurements:
        same = (other.problem, other.name, other.method) == (one.problem, one.name, one.method)
        if same and other.backend == over and one.backend != over:
            return other.seconds / one.seconds if other.seconds and one.seconds else None
    return None


def memory_ratio(measurements: list[Measurement], one: Measurement, to: str = SDPA) -> float | None:
    """Extra memory as a multiple of a baseline's, if both were measured."""
    other = baseline(measurements, one, to)
    return one.extra_bytes / other.extra_bytes if other and other.extra_bytes and one.extra_bytes is not None else None


def machine() -> dict[str, Any]:
    """Processor, threads and versions."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "smyrf": smyrf.__version__,
        "rich": version("rich"),
        "commit": _commit(),
    }


def command_line() -> str:
    """The command that is running, as it would be typed."""
    return shlex.join(["smyrf", *sys.argv[1:]])


def save(path: Path, command: str, threads: int, config: dict[str, Any], measurements: list[Measurement]) -> None:
    """Writes the measurements of a run, with their ratios."""
    rows = []
    for one in measurements:
        rows.append(
            {
                **asdict(one.problem),
                "contender": one.name,
                "method": None if one.method is None else one.method.to_dict(),
                "backend": one.backend,
                "seconds": one.seconds,
                "extra_bytes": one.extra_bytes,
                "skipped": one.skipped,
                "speedup_over_sdpa": speedup(measurements, one),
                "speedup_over_eager_smyrf": speedup(measurements, one, EAGER),
                "speedup_over_torch_backend": speedup_over_backend(measurements, one),
                "gemm_gflops": one.gemm_gflops,
                "times_gemm_bound": one.times_gemm_bound,
                "memory_relative_to_sdpa": memory_ratio(measurements, one),
            }
        )
    write(path, command, threads, config, rows)


def write(
    path: Path,
    command: str,
    threads: int,
    config: dict[str, Any],
    rows: list[dict[str, Any]],
    also: dict[str, Any] | None = None,
) -> None:
    """Writes rows with what is needed to repeat them, under a temporary name first.

    A kill leaves the old file or the new one.

    Args:
        also: further fields, of what follows from all rows together.
    """
    data = {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "threads": threads,
        "machine": machine(),
        "config": config,
        "results": rows,
        **(also or {}),
    }
    write_json(path, data)


@lru_cache
def _commit() -> str | None:
    """The commit of the source tree that is running, "+" if it has changes; None for an installed package.

    Asked once: a tree that changes later is not the one that was loaded.
    """
    here = Path(__file__).parent
    try:
        sha = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "."], cwd=here, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return sha + ("+" if dirty else "")
