"""Writes docs/coverage.md, or compares it with what runs show: ``python -m tests.zoo [--check] [NAME…]``."""

from __future__ import annotations

import argparse
import sys
import warnings

import torch
import transformers
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.zoo.check import CheckError, Row, check
from tests.zoo.entries import ARCHITECTURES
from tests.zoo.page import COMMAND, PAGE, read, render, state


def main() -> int:
    """Runs the command.

    Returns:
        1 if an architecture fails its check, or the page is not up to date; 0 otherwise.
    """
    parser = argparse.ArgumentParser(prog=COMMAND, description="which architectures smyrf.replace_attention covers")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these architectures, and write nothing")
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    options = parser.parse_args()
    chosen = [one for one in ARCHITECTURES if not options.names or one.name in options.names]
    if unknown := set(options.names) - {one.name for one in chosen}:
        parser.error(f"there is no architecture {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)  # the models are too small for more
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # of transformers, about its own code
    console = Console(highlight=False, soft_wrap=True)
    rows: list[Row] = []
    failed = 0
    columns = (SpinnerColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for one in chosen:
            progress.update(task, description=one.name)
            try:
                rows.append(check(one))
            except CheckError as error:
                failed += 1
                console.print(f"[red]{one.name}[/red]: {error}")
            progress.advance(task)

    for row in rows if options.names else ():
        console.print(f"{row.architecture.name}: {state(row)} {'; '.join(row.reasons)}")
    if options.check:
        stated = read()
        for row in rows:
            there = stated.get(row.architecture.name)
            if there != state(row):
                failed += 1
                console.print(f"[red]{row.architecture.name}[/red]: {state(row)}, but {PAGE.name} says {there}")
        gone = [] if options.names else [name for name in stated if name not in {one.name for one in chosen}]
        for name in gone:
            failed += 1
            console.print(f"[red]{name}[/red] is in {PAGE.name}, but not in the zoo")
    elif not options.names and not failed:
        PAGE.write_text(render(rows), encoding="utf-8")
        console.print(f"{PAGE.name}: {len(rows)} architectures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
