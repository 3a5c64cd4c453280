"""Tables and figures of the runs of benchmarks/biggan.py.

    python benchmarks/biggan_report.py OUTPUT RESULTS

Of each run in OUTPUT its scores, losses and last grid are copied to RESULTS, without weights; report.md has the tables,
trained.png images of all generators side by side, swap.png what another attention does to the dense generators.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from biggan import SEEDS, SWAPPED, TRAINED

from smyrf.atomic import write_json, write_text
from smyrf.figures import LOOKS, save_figure
from smyrf.methods import method_from_dict, method_label, parse_method


def load(output: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """What there is of each run, by what it was trained with and by seed."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in TRAINED:
        for seed in SEEDS:
            folder = output / f"{name}-seed{seed}"
            if (folder / "score.json").exists():
                files = sorted(folder.glob("*.json"))
                found.setdefault(name, {})[seed] = {path.stem: json.loads(path.read_text()) for path in files}
    return found


def figures(values: Iterable[float], digits: int = 1) -> str:
    """A mean, and the single values behind it: two seeds have no deviation worth the name."""
    values = list(values)
    single = ", ".join(f"{value:.{digits}f}" for value in values)
    return f"{mean(values):.{digits}f} ({single})" if len(values) > 1 else single


def trained_table(runs: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = ["| trained and drawn with | memory | Fréchet distance (seeds) | last losses G, D | real, fake score |"]
    lines.append("|---|---:|---:|---:|---:|")
    for name, seeds in runs.items():
        method = parse_method(TRAINED[name])
        scores = [one["score"]["scores"][0] for one in seeds.values()]
        losses = [one["state"]["losses"][-1] for one in seeds.values()]
        cells = [method_label(method), f"{100 * method.memory_share(256, 1024):.3g}%"]
        cells.append(figures(one["frechet_distance"] for one in scores))
        for pair in (("generator", "discriminator"), ("real", "fake")):
            cells.append(", ".join(f"{mean(one[which] for one in losses):.2f}" for which in pair))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def swap_rows(runs: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each attention that the dense generators were given: distances of every seed."""
    rows = []
    for number in range(len(SWAPPED)):
        whole = [files for files in runs["dense"].values() if {"swap", "distances"} <= set(files)]
        scores = [files["swap"]["scores"][number] for files in whole]
        rows.append(
            {
                "method": scores[0]["method"],
                "memory": scores[0]["memory"],
                "frechet": [one["frechet_distance"] for one in scores],
                "to_dense": [one["frechet_distance_to_dense"] for one in scores],
                "distance": [files["distances"][number] for files in whole],
            }
        )
    return rows


def swap_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| attention | memory | Fréchet to test images | Fréchet to its dense images | ‖image − dense‖ / ‖dense‖ |"
    ]
    lines.append("|---|---:|---:|---:|---:|")
    for row in rows:
        cells = [method_label(method_from_dict(row["method"])), f"{100 * row['memory']:.3g}%"]
        cells += [figures(row["frechet"]), figures(row["to_dense"], 2), figures(row["distance"], 3)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def plot_swap(rows: list[dict[str, Any]], path: Path) -> list[Path]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for kind in ("smyrf", "tangent"):
        some = sorted((row for row in rows if row["method"]["kind"] == kind), key=lambda row: row["memory"])
        for one, what in zip(axes, ("to_dense", "distance"), strict=True):
            label, look = kind.capitalize(), LOOKS[kind.capitalize()]
            one.plot([100 * row["memory"] for row in some], [mean(row[what]) for row in some], "o", label=label, **look)
    for one, title in zip(axes, ("Fréchet distance to its dense images", "‖image − dense‖ / ‖dense‖"), strict=True):
        one.set(xscale="log", yscale="log", xlabel="key visits of a query, % of dense", title=title)
        one.set_xticks([1.6, 6.25, 12.5, 25, 50], ["1.6", "6.25", "12.5", "25", "50"])
        one.minorticks_off()
        one.grid(alpha=0.3)
        one.legend()
    return save_figure(figure, path)


def plot_trained(output: Path, runs: dict[str, dict[str, dict[str, Any]]], path: Path) -> list[Path]:
    import matplotlib.pyplot as plt

    size = 2.6 * len(runs), 5.6
    figure, axes = plt.subplots(len(SEEDS), len(runs), figsize=size, layout="constrained", squeeze=False)
    for column, (name, seeds) in enumerate(runs.items()):
        for row, seed in enumerate(SEEDS):
            one = axes[row, column]
            one.axis("off")
            if seed in seeds:
                one.imshow(plt.imread(output / f"{name}-seed{seed}" / "grid.png"), cmap="gray")
                distance = seeds[seed]["score"]["scores"][0]["frechet_distance"]
                one.set_title(
                    f"{method_label(parse_method(TRAINED[name]))}, seed {seed}\nFréchet {distance:.1f}", size=9
                )
    return save_figure(figure, path)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    output, results = map(Path, sys.argv[1:])
    runs = load(output)
    if not any({"swap", "distances"} <= set(files) for files in runs.get("dense", {}).values()):
        sys.exit(f"{output} has no finished run of the dense generator")
    rows = swap_rows(runs)
    for name, seeds in runs.items():
        for seed, files in seeds.items():
            write_json(results / f"{name}-seed{seed}.json", files)
    lines = ["# Small BigGANs on Fashion-MNIST", "", *trained_table(runs), "", *swap_table(rows), ""]
    write_text(results / "report.md", "\n".join(lines))
    for path in (*plot_swap(rows, results / "swap"), *plot_trained(output, runs, results / "trained")):
        print(f"written: {path}")


if __name__ == "__main__":
    main()
