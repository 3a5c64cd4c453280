"""Measurements of a benchmark, ratios between them, and their rows in a result file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from smyrf.backends import find_backend
from smyrf.methods import Method
from smyrf.tools.bench.baselines import BASELINES, EAGER, SDPA
from smyrf.tools.bench.problems import Problem
from smyrf.tools.bench.roofline import flops


@dataclass(frozen=True)
class Measurement:
    """One attention on one problem.

    Args:
        name: of a baseline, or the kind of the method.
        method: None for a dense baseline.
        seconds: best time of a call; None if it was not run.
        extra_bytes: peak memory beyond the inputs; None if it was not measured.
        skipped: why it was not run, or None.
        backend: that was asked for; None for the best for the device.
        gemm_gflops: rate of large matrix products, timed in turn with it; None if it was not measured.
    """

    problem: Problem
    name: str
    method: Method | None
    seconds: float | None = None
    extra_bytes: int | None = None
    skipped: str | None = None
    backend: str | None = None
    gemm_gflops: float | None = None

    @property
    def is_baseline(self) -> bool:
        """Whether it is one of `BASELINES`, not a method of this package."""
        return self.name in BASELINES

    @property
    def label(self) -> str:
        """Label of the method and the backend that was asked for, or name of the baseline.

        Example:
            >>> from smyrf.methods import Smyrf
            >>> problem = Problem(1, 4, 1024, 64, "float32", False)
            >>> Measurement(problem, "smyrf", Smyrf(4, 64), backend="torch").label
            'Smyrf 4×64 · torch'
            >>> Measurement(problem, "eager smyrf", Smyrf(4, 64)).label, Measurement(problem, "sdpa", None).label
            ('eager smyrf 4×64', 'sdpa')
        """
        if self.method is None:
            return self.name
        if self.is_baseline:
            return f"{self.name} {self.method.size_label}"
        return self.method.label if self.backend is None else f"{self.method.label} · {self.backend}"

    @property
    def times_gemm_bound(self) -> float | None:
        """Time as a multiple of the time for its matrix products only, at the rate of large ones on this machine.

        `roofline.flops` counts the operations. None for baselines, in half precision, and if it was not run.

        Example:
            >>> from smyrf.methods import Smyrf
            >>> problem = Problem(1, 4, 1024, 64, "float32", False)
            >>> Measurement(problem, "smyrf", Smyrf(4, 64), 0.008, gemm_gflops=67.108864).times_gemm_bound
            2.0
        """
        if self.method is None or self.is_baseline or self.seconds is None or self.gemm_gflops is None:
            return None
        return self.seconds / (flops(self.problem, self.method) / (self.gemm_gflops * 1e9))


def baseline(measurements: list[Measurement], one: Measurement, name: str) -> Measurement | None:
    """The measurement of a baseline on the same problem, and for the same method if the baseline has one."""
    for other in measurements:
        if other.problem == one.problem and other.name == name and other.method in (None, one.method):
            return other
    return None


def speedup(measurements: list[Measurement], one: Measurement, over: str = SDPA) -> float | None:
    """How many times faster than a baseline, if both were run."""
    other = baseline(measurements, one, over)
    return other.seconds / one.seconds if other and other.seconds and one.seconds else None


def speedup_over_backend(measurements: list[Measurement], one: Measurement, over: str = "torch") -> float | None:
    """How many times faster than the same method on another backend, if both were run."""
    for other in measurements:
        same = (other.problem, other.name, other.method) == (one.problem, one.name, one.method)
        if same and other.backend == over and one.backend != over:
            return other.seconds / one.seconds if other.seconds and one.seconds else None
    return None


def memory_ratio(measurements: list[Measurement], one: Measurement, to: str = SDPA) -> float | None:
    """Extra memory as a multiple of a baseline's, if both were measured."""
    other = baseline(measurements, one, to)
    return one.extra_bytes / other.extra_bytes if other and other.extra_bytes and one.extra_bytes is not None else None


def rows(measurements: list[Measurement]) -> list[dict[str, Any]]:
    """Rows of a result file. Each names the backend that ran it, None for a baseline."""
    default = find_backend(None, torch.device("cpu")).name
    return [
        {
            **asdict(one.problem),
            "contender": one.name,
            "method": None if one.method is None else one.method.to_dict(),
            "backend": None if one.is_baseline else one.backend or default,
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
        for one in measurements
    ]
