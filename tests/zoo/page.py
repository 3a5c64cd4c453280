"""docs/coverage.md: written from rows, and read again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

import smyrf
from tests.zoo.check import APPROXIMATE, EXACT, LARGEST_DIFFERENCE, NEW_TOKENS, SENSITIVITY, Row

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
COMMAND = "python -m tests.zoo"
FAMILIES = {
    "text encoder": "Text encoders",
    "encoder–decoder": "Encoder–decoders",
    "decoder": "Decoders",
    "vision": "Vision",
    "audio": "Audio",
    "multimodal": "Images and text",
}
MEANINGS = {
    "replaced": "all attention layers attend by the method",
    "partly": "some do; the others stay dense, and the remark says why",
    "dense": (
        "only a call shows whether it can be served, and on these inputs none could: the outputs are right,\n"
        "  nothing is gained, and `report.calls` says so"
    ),
    "refused": "`replace_attention` raises a `ValueError` that says why, before it changes anything",
}
HEAD = """# Which architectures are covered

What `smyrf.replace_attention` does with tiny, randomly initialised models of {n} architectures of transformers:
{counts}.

Made by `{command}` with torch {torch} and transformers {transformers}. `{command} --check` runs
everything again and compares the verdicts with this page; `tests/models/test_coverage.py` does so, too.

## What the verdicts mean

{meanings}

Layers are counted in the tiny models, which have two, or two in each part: "1 of 2" stands for one of each pair of
layers. Sliding windows are shorter than the texts here; a layer with a window is served as long as the text fits into
it. Pooling heads, which have one query, are not counted. A model that "does not ask transformers for its attention" has
code of its own for it; one that "does not support scaled_dot_product_attention" says so of itself, in most cases
because it adds something to the scores.

## What was verified

For every model that is not refused, with weights that make attention far from uniform:

- With one cluster, `{exact}`, run by our kernel, the outputs are those of dense attention.
  "Difference" is the largest one, relative to the largest output, and must be below {largest:.0e}.
- Where the column "padding" says yes, rows have different lengths: padding is on the right for encoders and on the
  left for decoders. It holds words like any other place, and all outputs change by more than {sensitivity:.0%} if
  attention sees it.
- Greedy `generate()` gives the {new_tokens} tokens that dense attention gives.
- With `{approximate}` all outputs are finite, and not those of dense attention.
- The report names every module that was seen to compute attention.
- After `restore_attention` the outputs are what they were, bit for bit; so they are after a refusal.
"""
COLUMNS = ("architecture", "class", "verdict", "layers", "padding", "difference", "generate()", "remark")


class Stated(NamedTuple):
    """What the page says of an architecture."""

    verdict: str
    layers: str

    def __str__(self) -> str:
        return f"{self.verdict} {self.layers}".strip()


def render(rows: Sequence[Row]) -> str:
    """The page."""
    counts = Counter(row.verdict for row in rows)
    head = HEAD.format(
        n=len(rows),
        counts=", ".join(f"**{counts[verdict]} {verdict}**" for verdict in MEANINGS),
        command=COMMAND,
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
        meanings="\n".join(f"- **{verdict}**: {meaning}." for verdict, meaning in MEANINGS.items()),
        exact=_call(EXACT),
        approximate=_call(APPROXIMATE),
        largest=LARGEST_DIFFERENCE,
        sensitivity=SENSITIVITY,
        new_tokens=NEW_TOKENS,
    )
    parts = [head]
    for family, title in FAMILIES.items():
        table = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
        table += [_line(_cells(row)) for row in rows if row.architecture.family == family]
        parts.append("\n".join([f"## {title}", "", *table, ""]))
    return "\n".join(parts)


def read(page: Path = PAGE) -> dict[str, Stated]:
    """What a page says, by the name of the architecture."""
    stated = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(COLUMNS) and cells[0] not in (COLUMNS[0], "---"):
            stated[cells[0]] = Stated(cells[2], cells[3])
    return stated


def state(row: Row) -> Stated:
    """What the page should say of a row."""
    return Stated(row.verdict, "" if row.verdict == "refused" else f"{row.n_replaced} of {row.n_layers}")


def _call(method: smyrf.Smyrf) -> str:
    return f"Smyrf(n_hashes={method.n_hashes}, cluster_size={method.cluster_size})"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row) -> list[str]:
    verdict, layers = state(row)
    refused = verdict == "refused"
    return [
        row.architecture.name,
        f"`{row.architecture.model}`",
        verdict,
        layers,
        "" if refused else "yes" if row.padded else "no",
        "" if row.difference is None else f"{row.difference:.0e}" if row.difference else "0",
        "same" if row.generated else "",
        _remark(row),
    ]


def _remark(row: Row) -> str:
    if row.verdict == "refused":
        (error,) = row.reasons
        return error.partition("can be replaced: ")[2].partition(" (smyrf.intercept_sdpa")[0]
    remarks = [f"{n} dense: {reason}" for reason, n in row.reasons.items()]
    return "; ".join(remarks + ["its pooling head, with one query, is dense"] * bool(row.n_heads))
