"""Attacks the package, writes the counts as JSON, and shows them: ``python -m tests.attack``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.attack import PARTS, load_part, page, pool
from tests.attack.worker import load_library


def main() -> int:
    """Runs the command.

    Returns:
        1 if a promise was broken, 0 otherwise.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description="attack smyrf and count what breaks")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part only; may be given several times")
    parser.add_argument("--cases", type=int, help="cases of each part, instead of its own number")
    parser.add_argument("--minutes", type=float, help="end each part after this time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case; a case of fuzz is its seed")
    parser.add_argument("--json", type=Path, help="write the counts and all failures to this file")
    parser.add_argument("--page", type=Path, help="write the counts of --json, or of the last run, into this page")
    options = parser.parse_args()
    if options.page is not None and options.only is None and options.cases is None and options.minutes is None:
        return page.write(options.page, options.json or page.LAST)
    load_library()
    console = Console(highlight=False, soft_wrap=True)
    results = {}
    for name in options.only or PARTS:
        results[name] = attack(name, options, console)
        if options.json is not None:
            write(options.json, results, options)
    for name, found in results.items():
        console.print(f"{name}: {found['cases']:,} cases, {len(found['failures'])} failures, {found['seconds']:.0f} s")
    if options.page is not None:
        page.write(options.page, options.json)
    return int(any(found["failures"] for found in results.values()))


def attack(name: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run one part and count."""
    part = load_part(name)
    n_cases = options.cases if options.cases is not None or options.minutes is not None else PARTS[name]
    total = None if n_cases is None else sum(1 for _ in part.cases(options.seed, n_cases))
    begin, counts, tally, failures = time.monotonic(), Counter(), Counter(), []
    said = begin
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=total)
        for case, verdict in pool.run(part, part.cases(options.seed, n_cases), options.minutes):
            counts[case["kind"]] += verdict.count
            tally.update(verdict.tally)
            bar.advance(task)
            if not console.is_terminal and time.monotonic() > said + 60:  # where no bar is shown
                said = time.monotonic()
                console.print(f"{name}: {sum(counts.values()):,} cases, {len(failures)} failed")
            if verdict.failures:
                failures.append({**case, "failures": list(verdict.failures)})
                bar.update(task, description=f"{name}, {len(failures)} failed")
                console.print(f"[red]{name}[/] {case}", *verdict.failures, sep="\n    ")
    return {
        "cases": sum(counts.values()),
        "seconds": round(time.monotonic() - begin, 1),
        "by_kind": dict(sorted(counts.items())),
        "comparisons": dict(sorted(tally.items())),
        "failures": failures,
    }


def write(path: Path, results: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the results with the command, the commit and the versions."""
    from smyrf.tools.results import write_results

    config = {name: getattr(options, name) for name in ("only", "cases", "minutes", "seed")}
    rows = [{"part": name, **found} for name, found in results.items()]
    command = " ".join(["python -m tests.attack", *sys.argv[1:]])
    write_results(path, rows, threads=1, config=config, also={"command": command})


if __name__ == "__main__":
    sys.exit(main())
