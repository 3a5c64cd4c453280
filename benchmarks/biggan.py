"""The runs behind docs/results.md on images: small BigGANs on Fashion-MNIST with different attention at 32×32 pixels.

    python benchmarks/fashion.py /usr/share/datasets/fashion-mnist DATA
    python benchmarks/biggan.py DATA OUTPUT [--part 0/2]

Each run is a separate command, printed before it is started; what is finished is skipped, what was interrupted goes
on. With --part i/n every n-th training is done, so that n processes share the work. Of each, OUTPUT has the trained
average.safetensors, the last grid of images and the scores; real.json has the distance of real images.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from math import sqrt
from pathlib import Path
from statistics import fmean

import torch

from smyrf.atomic_write import write_json
from smyrf.experiments.biggan import load_generator
from smyrf.experiments.biggan.features import FeatureNetwork, look
from smyrf.experiments.biggan.pictures import load_pictures
from smyrf.experiments.biggan.sample import compare
from smyrf.experiments.biggan.score import real_moments
from smyrf.experiments.biggan.statistics import frechet_distance, moments
from smyrf.methods import parse_method

SEEDS = ("0", "1")
N_STEPS, N_IMAGES = "3000", "5000"
# Steps of one dense training after which its attention is looked at: is it sparse early?
WATCHED = ("1", "100", "250", "500", "1000", "2000", N_STEPS)
# What a generator is trained with, by its name in the results. 1024 queries on 256 keys: shares of them.
TRAINED = {
    "dense": "dense",
    "smyrf-50": "smyrf:32x16",
    "tangent-12.5": "tangent:0.125",
    # The paper's failure: four keys for each query. Tangent's own least is eleven; its sizes are given for four.
    "smyrf-1.6": "smyrf:1x16",
    "tangent-1.6": "tangent:0.016,cluster_size=512,n_near=2,n_far=1",
}
# What the dense generator is given without training: 50, 25, 12.5, 6.25 and 1.6%.
SWAPPED = (
    "dense",
    *(f"smyrf:{rounds}x16" for rounds in (32, 16, 8, 4, 1)),
    *(f"tangent:{share}" for share in (0.5, 0.25, 0.125, 0.0625)),
    TRAINED["tangent-1.6"],
)
# Of them, what is worth looking at side by side.
SHOWN = ("dense", "smyrf:32x16", "smyrf:8x16", "smyrf:1x16", "tangent:0.125", TRAINED["tangent-1.6"])


def run(*words: str | Path) -> None:
    """A command of ours, printed and run."""
    command = [str(word) for word in words]
    print("smyrf", shlex.join(command), flush=True)
    subprocess.run([sys.executable, "-m", "smyrf", *command], check=True)


def train(data: Path, output: Path, name: str, seed: str) -> None:
    """A generator, trained and scored with its own attention; the dense one with all others, the others with dense."""
    method, folder = TRAINED[name], output / f"{name}-seed{seed}"
    weights = folder / "average.safetensors"
    if not weights.exists():
        shape = ("--resolution", "32", "--colours", "1", "--channels", "8", "--latent", "64", "--attention", "32")
        how = ("--batch", "32", "--ema", "0.995", "--ema-start", "200", "--threads", "1")
        # The rates of the paper, 2e-4 and 5e-5, are meant for 120,000 steps: after 1,000 images are still blobs.
        rates = ("--generator-rate", "5e-4", "--discriminator-rate", "1e-3")
        every = ("--log-every", "50", "--save-every", "250", "--grid-every", "500")
        place = ("--seed", seed, "--output", folder)
        is_watched = (name, seed) == ("dense", SEEDS[-1])
        command = ("biggan", "train", data / "train.npz", *shape, "--method", method, *how, *rates, *every, *place)
        for steps in WATCHED if is_watched else (N_STEPS,):
            if (folder / f"inspect-{steps}.json").exists():
                continue
            run(*command, "--steps", steps)  # goes on where the last ended, to the same weights as in one go
            if is_watched:
                watch(folder, steps)
        (last,) = folder.glob(f"*/checkpoint-{N_STEPS}")
        shutil.copy(last / "state.json", folder / "state.json")
        shutil.copy(max((last.parent / "grids").iterdir()), folder / "grid.png")
        shutil.copy(last / "average.safetensors", folder / "average.part")
        (folder / "average.part").replace(weights)
    features = ("--features", data / "classifier.pt", "--allow-torchscript")
    score = ("biggan", "score", weights, *features, "--number", N_IMAGES, "--batch", "50")
    other = {"swap": ",".join(SWAPPED)} if name == "dense" else {"dense": "dense"}
    for file, methods in {"score": method, **other}.items():
        if not (folder / f"{file}.json").exists():
            # Scores are kept one by one: only a file that has all of them gets the name that is looked for.
            part = folder / f"{file}.part"
            run(*score, "--methods", methods, "--real", data / "test.npz", "--threads", "1", "--json", part)
            part.replace(folder / f"{file}.json")
    if name == "dense" and not (folder / "distances.json").exists():
        # The figure's ten images have one draw of hashes: distances are of several.
        run("biggan", "sample", weights, "--methods", ",".join(SHOWN), "--number", "10", "--output", folder / "images")
        write_json(folder / "distances.json", distances(weights))
    if name == "dense" and not (folder / "clusters.png").exists():
        # The paper's figure: two clusters and 128.
        methods = "smyrf:1x512,smyrf:1x8,tangent:0.125"
        run("inspect", "clusters", weights, "--methods", methods, "--number", "6", "--output", folder / "clusters")


def watch(folder: Path, steps: str) -> None:
    """Sparsity of a generator's attention, and errors of the methods that others are trained with."""
    (weights,) = folder.glob(f"*/checkpoint-{steps}/generator.safetensors")
    options = ("--methods", ",".join(list(TRAINED.values())[1:]), "--number", "20", "--singular", "0", "--threads", "1")
    part = folder / f"inspect-{steps}.part"
    run("inspect", "biggan", weights, *options, "--json", part)
    part.replace(folder / f"inspect-{steps}.json")


def distances(weights: Path) -> list[float]:
    """‖image − dense‖ / ‖dense‖ of every attention that the dense generator is given: 20 draws of 50 images."""
    generator, methods = load_generator(weights), [parse_method(text) for text in SWAPPED]
    draws = [compare(generator, methods, 50, seed=seed, batch=50) for seed in range(20)]
    return [sqrt(fmean(rows[number].distance ** 2 for rows in draws)) for number in range(len(methods))]


def real_distance(data: Path) -> float:
    """Fréchet distance to the test images of as many training images as are drawn: what a generator could reach."""
    network = FeatureNetwork(data / "classifier.pt")
    train, test = (load_pictures(data / f"{split}.npz", 32, 1) for split in ("train", "test"))
    batches = (torch.stack([train[index][0] for index in some]) for some in torch.arange(int(N_IMAGES)).split(100))
    return frechet_distance(moments(look(network, batches).features), real_moments(network, test))


def main() -> None:
    arguments, part = sys.argv[1:], (0, 1)
    if "--part" in arguments:
        place = arguments.index("--part")
        part = tuple(map(int, arguments[place + 1].split("/")))
        del arguments[place : place + 2]
    if len(arguments) != 2:
        sys.exit(__doc__)
    data, output = map(Path, arguments)
    for name, seed in [(name, seed) for seed in SEEDS for name in TRAINED][part[0] :: part[1]]:
        train(data, output, name, seed)
    if not (output / "real.json").exists():
        write_json(output / "real.json", {"frechet_distance": real_distance(data), "images": int(N_IMAGES)})


if __name__ == "__main__":
    main()
