"""The table of counts in docs/reliability.md, from the result file of the last whole run."""

from __future__ import annotations

import json
from pathlib import Path

BEGIN, END = "<!-- counts -->\n", "<!-- /counts -->"
LAST = Path("benchmarks/results/attack.json")
TITLES = {
    "fuzz": "calls of `smyrf.attention` against an oracle",
    "misuse": "calls of stages, operators and the extension with changed arguments",
    "files": "damaged and malicious files",
    "kills": "kills",
    "disk": "full disks, read-only folders, umasks, links",
}


def write(page: Path, results: Path) -> int:
    """Replace the table of a page."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    page.write_text(before + BEGIN + table(results) + END + after, encoding="utf-8")
    return 0


def table(results: Path) -> str:
    """The table, as Markdown."""
    data = json.loads(results.read_text(encoding="utf-8"))
    lines = ["", "| part | cases | failures | minutes |", "|---|---:|---:|---:|"]
    for row in data["results"]:
        minutes = f"{row['seconds'] / 60:.1f}"
        lines.append(f"| {TITLES[row['part']]} | {row['cases']:,} | {len(row['failures']):,} | {minutes} |")
    machine = data["machine"]
    about = f"Commit {machine['commit']}, Python {machine['python']}, PyTorch {machine['torch']}, {machine['cpu']}."
    return "\n".join([*lines, "", f"Run on {data['date'][:10]} by `{data['command']}`.", about, "", ""])
