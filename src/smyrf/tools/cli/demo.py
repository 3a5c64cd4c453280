"""`smyrf demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from smyrf.tools.cli.validation import need, need_model, need_writable


def demo(
    output: Annotated[Path, typer.Option(help="Folder for results and plots.")] = Path("demo"),
    benchmark: Annotated[bool, typer.Option(help="Also run a short benchmark.")] = True,
) -> None:
    """Replace the attention of a pretrained encoder without retraining: drift, errors, time and memory."""
    need_model("minilm")
    need("matplotlib", "demo")
    need_writable("output", output / "compare.json")
    from smyrf.tools.demo import run_benchmark, run_comparison, run_errors

    console = Console()
    run_comparison(output, console)
    run_errors(output, console)
    if benchmark:
        run_benchmark(output, console)
