"""Fashion-MNIST for the runs of benchmarks/biggan.py, and a network in whose features images are compared.

    python benchmarks/fashion.py IDX OUTPUT

IDX is the folder of the Debian package dataset-fashion-mnist (/usr/share/datasets/fashion-mnist), with four .gz files.
Written into OUTPUT: train.npz and test.npz, images padded with black from 28×28 to 32×32 pixels, and classifier.pt, a
TorchScript network that gives 64 features and the logits of 10 classes. Training it takes two minutes on two cores.
"""

from __future__ import annotations

import gzip
import struct
import sys
import warnings
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

N_EPOCHS, BATCH, SEED = 3, 128, 0


class Classifier(nn.Module):
    """Three convolutions that halve the image, features, classes."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(64 * 16, 64)),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(images)
        return features, self.head(F.relu(features))


def read_idx(path: Path) -> numpy.ndarray:
    """Bytes of an IDX file: two zero bytes, a type, the number of axes, their lengths."""
    content = gzip.decompress(path.read_bytes())
    n_axes = content[3]
    shape = struct.unpack(f">{n_axes}I", content[4 : 4 + 4 * n_axes])
    return numpy.frombuffer(content, numpy.uint8, offset=4 + 4 * n_axes).reshape(shape).copy()


def load(folder: Path, split: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Images ``(n, 32, 32)`` and labels ``(n,)``; split is "train" or "t10k"."""
    images = read_idx(folder / f"{split}-images-idx3-ubyte.gz")
    return numpy.pad(images, ((0, 0), (2, 2), (2, 2))), read_idx(folder / f"{split}-labels-idx1-ubyte.gz")


def to_tensor(images: numpy.ndarray) -> Tensor:
    """Images ``(n, 1, 32, 32)`` between −1 and 1."""
    return torch.from_numpy(images)[:, None].float() / 127.5 - 1.0


def train(images: Tensor, labels: Tensor) -> Classifier:
    """A classifier; the learning rate falls along a cosine."""
    torch.manual_seed(SEED)
    network = Classifier()
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3)
    n_steps = N_EPOCHS * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    for _ in track(range(n_steps), "train the classifier"):
        rows = torch.randint(len(images), (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(network(images[rows])[1], labels[rows]).backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, output = map(Path, sys.argv[1:])
    output.mkdir(parents=True, exist_ok=True)
    splits = {"train": load(source, "train"), "test": load(source, "t10k")}
    for name, (images, labels) in splits.items():
        numpy.savez_compressed(output / f"{name}.npz", images=images, labels=labels)
    network = train(to_tensor(splits["train"][0]), torch.from_numpy(splits["train"][1]).long())
    images, labels = to_tensor(splits["test"][0]), torch.from_numpy(splits["test"][1]).long()
    with torch.no_grad():
        found = torch.cat([network(part)[1].argmax(1) for part in images.split(500)])
    print(f"accuracy on {len(images):,} test images: {100 * (found == labels).float().mean():.1f}%")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what `smyrf biggan score --allow-torchscript` reads
        torch.jit.script(network).save(str(output / "classifier.pt"))


if __name__ == "__main__":
    main()
