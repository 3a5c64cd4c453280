"""Tables and figures of the runs of benchmarks/biggan.py.

    python benchmarks/biggan_report.py OUTPUT RESULTS

Of each run in OUTPUT its scores, losses and last grid are copied to RESULTS, without weights; report.md has the tables,
trained.png images of all generators side by side, losses.png how the discriminators told their images from real ones,
swap.png what another attention does to the dense generators, swapped.png images of one of them and clusters.png the
clusters of their pixels, course.png errors of attention while a dense generator is trained.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from biggan import SEEDS, SWAPPED, TRAINED, WATCHED

from smyrf.atomic_write import write_json, write_text
from smyrf.experiments.biggan import load_generator
from smyrf.experiments.biggan.networks import attention_blocks
from smyrf.methods import method_from_dict, parse_method
from smyrf.tools.plotting import LOOKS, save_figure


def load(output: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """What there is of each run, by what it was trained with and by seed."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in TRAINED:
        for seed in SEEDS:
            folder = output / f"{name}-seed{seed}"
            if (folder / "score.json").exists():
                files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
                (block,) = attention_blocks(load_generator(folder / "average.safetensors"))
                found.setdefault(name, {})[seed] = {**files, "gamma": block.gamma.item()}
    return found


def figures(values: Iterable[float], form: str = ".1f") -> str:
    """A mean, and the single values behind it: two seeds have no deviation worth the name."""
    values = list(values)
    single = ", ".join(format(value, form) for value in values)
    return f"{mean(values):{form}} ({single})" if len(values) > 1 else single


def trained_table(runs: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    names = "memory", "Fréchet distance (seeds)", "drawn with dense", "γ", "last losses G, D", "real, fake score"
    lines = [f"| trained and drawn with | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for name, seeds in runs.items():
        method = parse_method(TRAINED[name])
        scores = [one["score"]["scores"][0] for one in seeds.values()]
        losses = [one["state"]["losses"][-1] for one in seeds.values()]
        cells = [method.label, f"{100 * method.memory_share(256, 1024):.3g}%"]
        cells.append(figures(one["frechet_distance"] for one in scores))
        dense = [one["dense"]["scores"][0]["frechet_distance"] for one in seeds.values() if "dense" in one]
        cells.append(figures(dense) if dense else "")
        cells.append(", ".join(f"{one['gamma']:.2f}" for one in seeds.values()))
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
        cells = [method_from_dict(row["method"]).label, f"{100 * row['memory']:.3g}%"]
        of_dense = row["method"]["kind"] == "dense"
        cells.append(figures(row["frechet"]))
        cells += ["–" if of_dense else figures(row[what], ".2g") for what in ("to_dense", "distance")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def course_rows(runs: dict[str, dict[str, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    """What was seen of a dense generator's attention in training, by step."""
    files = runs["dense"].get(SEEDS[-1], {})
    return [(int(steps), files[f"inspect-{steps}"]["results"][0]) for steps in WATCHED if f"inspect-{steps}" in files]


def course_table(rows: list[tuple[int, dict[str, Any]]]) -> list[str]:
    labels = [outcome["label"] for outcome in rows[0][1]["outcomes"]] if rows else []
    lines = [f"| steps | weights below 0.01 | below 1/M | {' | '.join(f'error, {label}' for label in labels)} |"]
    lines.append(f"|{'---:|' * (3 + len(labels))}")
    for steps, head in rows:
        cells = [f"{steps:,}", *(f"{100 * head[name]:.1f}%" for name in ("below_small", "below_uniform"))]
        cells += [f"{outcome['error']:.3f}" for outcome in head["outcomes"]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def plot_course(rows: list[tuple[int, dict[str, Any]]], path: Path) -> list[Path]:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.6, 3.6), layout="constrained")
    for number, first in enumerate(rows[0][1]["outcomes"]):
        look = LOOKS[first["method"]["kind"].capitalize()] | {"linestyle": "-" if first["share"] > 0.1 else "--"}
        errors = [head["outcomes"][number]["error"] for _, head in rows]
        axis.plot([steps for steps, _ in rows], errors, "o", label=first["label"], **look)
    axis.set(xscale="log", yscale="log", xlabel="steps of a dense training", ylabel="‖output − dense‖ / ‖dense‖")
    axis.set_title("Error of attention in a generator that is being trained", loc="left", size=10)
    axis.grid(alpha=0.3)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save_figure(figure, path)


def plot_losses(runs: dict[str, dict[str, dict[str, Any]]], path: Path) -> list[Path]:
    """Scores of real and of generated images: a discriminator that has won keeps them far apart."""
    import matplotlib.pyplot as plt

    size = 2.6 * len(runs), 2.8
    figure, axes = plt.subplots(1, len(runs), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for one, (name, seeds) in zip(axes[0], runs.items(), strict=True):
        for number, files in enumerate(seeds.values()):
            # The watched training has a row of its very first step, which no other has.
            losses = [row for row in files["state"]["losses"] if row["step"] > 1]
            for which, colour in (("real", "#1f2937"), ("fake", "#c2410c")):
                values = [row[which] for row in losses]
                label = f"{which} images" if number == 0 else None
                one.plot([row["step"] for row in losses], values, color=colour, lw=1, ls="-:"[number % 2], label=label)
        one.set_title(parse_method(TRAINED[name]).label, size=9)
        one.set(xlabel="steps")
        one.grid(alpha=0.3)
    axes[0, 0].set(ylabel="mean score")
    axes[0, 0].legend(fontsize=8)
    return save_figure(figure, path)


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
                one.set_title(f"{parse_method(TRAINED[name]).label}, seed {seed}\nFréchet {distance:.1f}", size=9)
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
    lines = ["# Small BigGANs on Fashion-MNIST", "", *trained_table(runs), ""]
    if (output / "real.json").exists():
        real = json.loads((output / "real.json").read_text())
        write_json(results / "real.json", real)
        lines += [f"{real['images']:,} training images: Fréchet distance {real['frechet_distance']:.2f}.", ""]
    lines += [*swap_table(rows), ""]
    written = [*plot_swap(rows, results / "swap"), *plot_trained(output, runs, results / "trained")]
    written += plot_losses(runs, results / "losses")
    course = course_rows(runs)
    if course:
        lines += [*course_table(course), ""]
        written += plot_course(course, results / "course")
    write_text(results / "report.md", "\n".join(lines))
    for name, copied in (("images.png", "swapped.png"), ("clusters.png", "clusters.png")):
        first = output / f"dense-seed{SEEDS[0]}" / name
        if first.exists():
            written.append(Path(shutil.copy(first, results / copied)))
    for path in written:
        print(f"written: {path}")


if __name__ == "__main__":
    main()
