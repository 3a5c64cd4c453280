"""Show a text in the terminal, its tokens coloured by cluster."""

from __future__ import annotations

import colorsys
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from smyrf.tools.analysis.tokens import TokenView


def show(view: TokenView, token: int | None, title: str, console: Console) -> None:
    """Print the text, its clusters, and the strongest keys of `token` unless it is None."""
    captured = fmean(reach.captured for reach in view.reaches)
    what = f"layer {view.layer} head {view.head}, {view.method.label}, {view.n_clusters} clusters"
    console.print(f"[bold]smyrf inspect tokens[/]: {escape(title)}; {escape(what)}", highlight=False)
    console.print(coloured(view), "", sep="\n")
    console.print(cluster_table(view))
    console.print(
        f"a token visits {fmean(len(reach.keys) for reach in view.reaches):.0f} keys on average, which hold "
        f"{captured:.0%} of its softmax mass",
        highlight=False,
    )
    if token is not None:
        word = repr(_visible(view.tokens[token]))
        console.print(f"\nstrongest keys of token {token}, {escape(word)}:", highlight=False)
        console.print(key_table(view, token))


def coloured(view: TokenView) -> Text:
    """The text with each token on the colour of its cluster; adjacent clusters have similar colours."""
    found = Text()
    for word, reach in zip(view.tokens, view.reaches, strict=True):
        found.append(" " if word.startswith((" ", "\n")) and found else "")
        found.append(_visible(word), style=_style(reach.cluster, view.n_clusters))
    return found


def cluster_table(view: TokenView) -> Table:
    """Each cluster with the tokens of its queries and of its keys."""
    found = Table(
        title="Clusters, in sorting order",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        expand=True,
    )
    found.add_column("", justify="right", no_wrap=True)
    found.add_column("queries", ratio=1, no_wrap=True, overflow="ellipsis")
    found.add_column("keys", ratio=1, no_wrap=True, overflow="ellipsis")
    for cluster, keys in enumerate(view.cluster_keys):
        asking = [i for i, reach in enumerate(view.reaches) if reach.cluster == cluster]
        number = Text(f" {cluster} ", style=_style(cluster, view.n_clusters))
        found.add_row(number, *(Text(" ".join(_visible(view.tokens[i]) for i in some)) for some in (asking, keys)))
    return found


def key_table(view: TokenView, token: int) -> Table:
    """The strongest keys of one token, dense against approximate."""
    reach = view.reaches[token]
    found = Table(caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), min_width=60)
    found.add_column("key", justify="right")
    found.add_column("token")
    found.add_column("dense", justify="right")
    found.add_column(view.method.label, justify="right")
    found.add_column("")
    for one in reach.strongest:
        its = Text(_visible(view.tokens[one.key]), style=_style(view.reaches[one.key].cluster, view.n_clusters))
        found.add_row(str(one.key), its, f"{one.dense:.1%}", f"{one.approximate:.1%}", one.how)
    found.caption = f"it visits {len(reach.keys)} keys, which hold {reach.captured:.0%} of its mass"
    if reach.folded > 1e-6:
        found.caption += f", and gives {reach.folded:.0%} of its weight to the others through far keys"
    return found


def _visible(word: str) -> str:
    """A token without its leading blank, with line breaks made visible."""
    return word.replace("\n", "↵").strip(" ") or "␣"


def _style(cluster: int, n_clusters: int) -> str:
    """Dark text on a light colour by the index of the cluster; plain for a token in none."""
    if cluster < 0:
        return ""
    red, green, blue = colorsys.hsv_to_rgb(0.85 * cluster / max(1, n_clusters), 0.45, 0.95)
    return f"#111111 on #{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
