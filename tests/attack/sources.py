"""Small valid inputs of every command: models, texts, images, sounds, weights, data sets."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path

import numpy
import torch

WORDS = "the of a in to is and that it as for be "


class Sources:
    """Inputs by name, each made once, below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str) -> Path:
        """The path of an input, which nobody changes."""
        path = self.folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.manual_seed(0)
            MAKERS[name](path)
        return path


def _model(kind: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        from tests import subjects

        subjects.MODELS[kind](path)

    return make


def _encoder(path: Path) -> None:
    from tests import tiny

    tiny.save_encoder(path)


def _task(path: Path) -> None:
    from tests import tiny

    tiny.write_task(path, "rte")


def _texts(path: Path) -> None:
    path.mkdir()
    texts = [WORDS * (3 + i) for i in range(4)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (path / "a.jsonl").write_text(lines)
    (path / "a.txt").write_text("\n\n".join(texts))
    import gzip

    for name in ("a.jsonl", "a.txt"):
        with gzip.open(path / f"{name}.gz", "wb") as file:
            file.write((path / name).read_bytes())


def _images(path: Path) -> None:
    from PIL import Image

    chance = numpy.random.default_rng(0)
    path.mkdir()
    for name in ("a.png", "b.png", "c.png", "d.jpg"):
        Image.fromarray(chance.integers(0, 256, (48, 48, 3), numpy.uint8)).save(path / name)


def _sounds(path: Path) -> None:
    path.mkdir()
    for name in ("a.wav", "b.wav"):
        with wave.open(str(path / name), "wb") as file:
            file.setparams((1, 2, 16000, 8000, "NONE", ""))
            file.writeframes(numpy.random.default_rng(0).integers(-9999, 9999, 8000, numpy.int16).tobytes())


def _npz(path: Path) -> None:
    chance = numpy.random.default_rng(0)
    images = chance.integers(0, 256, (10, 32, 32), numpy.uint8)
    numpy.savez(path, images=images, labels=chance.permutation(10) % 3)


def _qkv(path: Path) -> None:
    q, k, v = (torch.randn(1, 2, 80, 8) for _ in "qkv")
    if path.suffix == ".npz":
        numpy.savez(path, q=q.numpy(), k=k.numpy(), v=v.numpy())
    else:
        from safetensors.torch import save_file

        save_file({"q": q, "k": k, "v": v}, path)


def _generator(path: Path) -> None:
    from smyrf.experiments.biggan.checkpoints import save_network
    from smyrf.experiments.biggan.config import Config
    from smyrf.experiments.biggan.networks import Generator

    config = Config(resolution=32, channels=2, n_classes=3, n_latent=8, n_shared=4, attention=(16,), n_colours=1)
    network = Generator(config)
    if path.suffix == ".safetensors":
        save_network(network, path)
    else:
        torch.save(network.state_dict(), path)


def _features(path: Path) -> None:
    class Flat(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, :3]

    torch.jit.script(Flat()).save(str(path))


def _plan(path: Path) -> None:
    from smyrf import Tangent
    from smyrf.models.plan import LayerPlan, Plan

    layers = tuple(LayerPlan(i, Tangent(0.25), 128, 512, 0.08, 1.5, "cheapest", f"layer {i}") for i in range(2))
    Plan(layers, 0.1, "").save(path)


MAKERS: dict[str, Callable[[Path], None]] = {
    "bert": _model("bert"),
    "vit": _model("vit"),
    "wav2vec2": _model("wav2vec2"),
    "encoder": _encoder,
    "task": _task,
    "texts": _texts,
    "images": _images,
    "sounds": _sounds,
    "images.npz": _npz,
    "qkv.npz": _qkv,
    "qkv.safetensors": _qkv,
    "g.pth": _generator,
    "g.safetensors": _generator,
    "features.pt": _features,
    "plan.json": _plan,
}
