"""Time and memory of a training step of BigGAN with attention at full resolution, by attention.

    python benchmarks/high_resolution.py --threads 2 --json …
    python benchmarks/high_resolution.py --alone --threads 2 --json …

The paper's faces: 96 channels, one class, attention after the generator's last block: at 128×128 pixels 16,384 queries
on 4,096 keys, at 256×256 four times as many of both. One image in a batch: what an image adds is what is compared.
Each case runs in a separate process: both networks, both optimizers, their first three steps; memory is what all of
that needs at its peak, time that of the better of the last two. With --alone it is only the attention block, forward
and backward: at 128×128 a step spends less on it than two runs of the same step differ. Results are kept after every
case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from smyrf.experiments.biggan.blocks import AttentionBlock
from smyrf.experiments.biggan.pictures import load_pictures
from smyrf.experiments.biggan.recipe import PRESETS
from smyrf.experiments.biggan.train import Losses, Run
from smyrf.methods import parse_method
from smyrf.tools.results import write_results
from smyrf.tools.subprocess_memory import peak_bytes
from smyrf.tools.tables import duration

NONE = "none"
CASES = {
    128: (NONE, "dense", "smyrf:4x2048", "tangent:0.125", "tangent:0.016"),
    256: (NONE, "dense", "smyrf:4x8192", "tangent:0.125", "tangent:0.016"),
}
N_STEPS = 3
# How a process ends for want of memory: killed by the system, or with what PyTorch says of an allocation.
KILLED, REFUSED = -9, "can't allocate memory"


class EnoughError(Exception):
    """Ends a run before it writes its networks."""


def measure(resolution: int, name: str, channels: int, threads: int) -> dict[str, Any]:
    """Seconds of a step and bytes at the peak."""
    torch.set_num_threads(threads)
    recipe = replace(PRESETS["celeba-128/dense-64"], batch_size=1, n_steps=N_STEPS + 1)  # the last would be saved
    attention = () if name == NONE else (resolution,)
    method = parse_method("dense" if name == NONE else name)
    shape = {"resolution": resolution, "channels": channels, "attention": attention, "method": method}
    recipe = replace(recipe, config=replace(recipe.config, **shape))
    times = [time.perf_counter()]
    with tempfile.TemporaryDirectory() as folder:
        images = numpy.random.default_rng(0).integers(0, 256, (2, resolution, resolution, 3), numpy.uint8)
        numpy.savez(Path(folder) / "images.npz", images=images)
        pictures = load_pictures(Path(folder) / "images.npz", resolution)

        def done(losses: Losses | None) -> None:
            times.append(time.perf_counter())
            if len(times) == N_STEPS + 1:
                raise EnoughError

        def train() -> None:
            run = Run(recipe, pictures, Path(folder) / "run")
            times[0] = time.perf_counter()
            try:
                run.train(done=done)
            except EnoughError:
                return

        n_bytes = peak_bytes(train)
    seconds = min(after - before for before, after in itertools.pairwise(times[1:]))
    return {
        "resolution": resolution,
        "attention": name,
        "method": None if name == NONE else method.to_dict(),
        "memory_share": None if name == NONE else method.memory_share(resolution**2 // 4, resolution**2),
        "seconds": seconds,
        "bytes": n_bytes,
    }


def measure_alone(resolution: int, name: str, channels: int, threads: int) -> dict[str, Any]:
    """Seconds and bytes of an attention block on an image of random numbers, forward and backward."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    method = parse_method(name)
    block = AttentionBlock(channels, method)
    x = torch.randn(1, channels, resolution, resolution, requires_grad=True)
    times = [time.perf_counter()]

    def attend() -> None:
        for _ in range(N_STEPS):
            block(x).sum().backward()
            times.append(time.perf_counter())

    n_bytes = peak_bytes(attend)
    seconds = min(after - before for before, after in itertools.pairwise(times[1:]))
    share = method.memory_share(resolution**2 // 4, resolution**2)
    found = {"resolution": resolution, "attention": name, "method": method.to_dict(), "memory_share": share}
    return {**found, "seconds": seconds, "bytes": n_bytes}


def ask(resolution: int, name: str, channels: int, threads: int, alone: bool) -> dict[str, Any]:
    """A measurement in a separate process; without numbers if it runs out of memory."""
    request = json.dumps([resolution, name, channels, threads, alone])
    answer = subprocess.run([sys.executable, __file__, "--case", request], capture_output=True, text=True, check=False)
    if answer.returncode == KILLED or REFUSED in answer.stderr:
        return {"resolution": resolution, "attention": name, "seconds": None, "bytes": None}
    if answer.returncode:
        last = (answer.stderr.strip() or f"it ended with {answer.returncode}").splitlines()[-1]
        raise RuntimeError(f"{name} at {resolution} failed: {last}")
    return json.loads(answer.stdout)


def table(rows: list[dict[str, Any]], channels: int, alone: bool) -> Table:
    what = "the attention block, forward and backward," if alone else "a training step"
    found = Table(title=f"{what} on one image, {channels} channels", title_justify="left")
    for name in ("pixels", "attention", "time", "× dense", "memory"):
        found.add_column(name, justify="left" if name == "attention" else "right", no_wrap=True)
    dense = {row["resolution"]: row["seconds"] for row in rows if row["attention"] == "dense"}
    previous = None
    for row in rows:
        if previous not in (None, row["resolution"]):
            found.add_section()
        previous, seconds = row["resolution"], row["seconds"]
        if seconds is None:
            found.add_row(str(row["resolution"]), row["attention"], "out of memory", "", "")
            continue
        whole = dense.get(row["resolution"])
        ratio = "" if whole is None else f"{seconds / whole:.2f}"
        memory = f"{row['bytes'] / 2**20:,.0f} MiB" if alone else f"{row['bytes'] / 2**30:.2f} GiB"
        found.add_row(str(row["resolution"]), row["attention"], duration(seconds), ratio, memory)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=96, help="fewer for a quick look")
    parser.add_argument("--resolutions", type=int, nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--alone", action="store_true", help="measure only the attention block")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.case is not None:
        *case, alone = json.loads(given.case)
        print(json.dumps((measure_alone if alone else measure)(*case)))
        return
    console, rows = Console(), []
    cases = [(resolution, name) for resolution in given.resolutions for name in CASES[resolution]]
    cases = [case for case in cases if not (given.alone and case[1] == NONE)]
    for resolution, name in track(cases, "attention blocks" if given.alone else "training steps", console=console):
        rows.append(ask(resolution, name, given.channels, given.threads, given.alone))
        if given.json is not None:
            config = {"channels": given.channels, "batch": 1, "steps": N_STEPS, "alone": given.alone}
            write_results(given.json, rows, threads=given.threads, config=config)
    console.print(table(rows, given.channels, given.alone))


if __name__ == "__main__":
    main()
