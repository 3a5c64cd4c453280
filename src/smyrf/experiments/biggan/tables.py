"""Tables of samples and scores for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from smyrf.experiments.biggan.sample import MethodImages
from smyrf.experiments.biggan.score import Score


def image_table(rows: Sequence[MethodImages], title: str) -> Table:
    """Make a table of memory and of distances to the images of dense attention."""
    found = _empty(title, "memory", "distance\nto dense")
    for row in rows:
        label = row.method.label
        style = "bold" if label.startswith("Tangent") else ""
        found.add_row(label, f"{100 * row.share:.3g}%", f"{row.distance:.4f}", style=style)
    found.caption = "memory: key visits per query, relative to dense; distance: ‖image − dense‖ / ‖dense‖"
    return found


def score_table(scores: Sequence[Score], title: str) -> Table:
    """Make a table of scores, beside the paper's for BigGAN on ImageNet at 128 pixels."""
    quoted = any(one.paper is not None and not one.method.is_dense for one in scores)
    names = [name for name, told in _COLUMNS.items() if any(told(one) is not None for one in scores)]
    found = _empty(title, "memory", *names, *(["paper's\nIS", "paper's\nFID"] if quoted else []))
    for one in scores:
        cells = [one.method.label, f"{100 * one.share:.3g}%"]
        for name in names:
            value = _COLUMNS[name](one)
            cells.append("–" if value is None else value)
        if quoted:
            paper = one.paper
            cells += ["–", "–"] if paper is None else [f"{paper[0]:.2f} ± {paper[1]:.2f}", f"{paper[2]:.2f}"]
        found.add_row(*cells, style="bold" if cells[0].startswith("Tangent") else "")
    found.caption = (
        f"{scores[0].n_images:,} images; Fréchet: distance to real images in features of the network (FID if it is "
        "Inception); to dense: distance to images of dense attention from the same latents; IS: inception score"
    )
    found.caption += "; paper: quoted, 128 pixels, ImageNet" if quoted else ""
    return found


_COLUMNS: dict[str, Callable[[Score], str | None]] = {
    "Fréchet": lambda one: None if one.frechet is None else f"{one.frechet:.3f}",
    "to dense": lambda one: None if one.to_dense is None else f"{one.to_dense:.3f}",
    "IS": lambda one: None if one.inception is None else f"{one.inception[0]:.2f} ± {one.inception[1]:.2f}",
}


def _empty(title: str, *names: str) -> Table:
    found = Table(
        title=escape(title), title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    found.add_column("attention", no_wrap=True)
    for name in names:
        found.add_column(name, justify="right", no_wrap=True)
    return found
