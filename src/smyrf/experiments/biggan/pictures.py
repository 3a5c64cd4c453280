"""Load images for training or scoring: from a folder, an .npz file, or a dataset saved by `datasets`.

Shapes: n images, R × R pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# Images in a fingerprint, and the maximum number of classes.
N_LOOKED_AT, MAX_CLASSES = 16, 100_000


class PictureError(ValueError):
    """Images that cannot be used; the message names the file."""


class Pictures(Dataset[tuple[Tensor, int]]):
    """Dataset of images between −1 and 1, each ``(colours, R, R)``, with their classes.

    Args:
        n: number of images.
        read: returns the PIL image and the class of an index.
        class_names: names by class index; one for images without classes.
        flip: mirror images at random.
    """

    def __init__(
        self,
        n: int,
        read: Callable[[int], tuple[Any, int]],
        class_names: tuple[str, ...],
        resolution: int,
        n_colours: int,
        *,
        flip: bool = False,
    ) -> None:
        self._n, self._read, self.class_names = n, read, class_names
        self.resolution, self.n_colours, self.flip = resolution, n_colours, flip

    def __len__(self) -> int:
        return self._n

    def fitted(self, resolution: int, n_colours: int, *, flip: bool) -> Pictures:
        """The same images at another resolution, without reading the source again."""
        return Pictures(self._n, self._read, self.class_names, resolution, n_colours, flip=flip)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the number of images, the classes and a sample of the images."""
        found = hashlib.sha256(repr((self._n, self.class_names, self.resolution, self.n_colours)).encode())
        for index in sorted({i * (self._n - 1) // (N_LOOKED_AT - 1) for i in range(N_LOOKED_AT)}):
            image, number = self._read(index)
            found.update(_fit(image, self.resolution, self.n_colours).numpy().tobytes() + bytes([number % 256]))
        return found.hexdigest()[:16]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, number = self._read(index)
        pixels = _fit(image, self.resolution, self.n_colours)
        if self.flip and torch.rand(()) < 0.5:
            pixels = pixels.flip(2)
        return pixels, number


def load_pictures(source: Path, resolution: int, n_colours: int = 3, *, flip: bool = False) -> Pictures:
    """Load images from a folder, an .npz file or a saved dataset.

    Subfolders are classes if all images are in subfolders. An .npz file holds ``images``, uint8 ``(n, H, W)``,
    ``(n, H, W, 3)`` or ``(n, 3, H, W)``, and optionally ``labels`` ``(n,)``; a dataset has a column ``image`` and
    optionally ``label``. Images are cropped to a centred square and resized.

    Raises:
        PictureError: the source cannot be read, or is invalid.
    """
    try:
        if source.suffix == ".npz":
            n, read, names = _from_npz(source)
        elif any((source / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
            n, read, names = _from_datasets(source)
        elif source.is_dir():
            n, read, names = _from_folder(source)
        else:
            raise PictureError(f"{source} is neither a folder nor an .npz file")
    except OSError as error:  # for example an invalid name, or missing permissions
        raise PictureError(f"{source} cannot be read: {error.strerror or error}") from error
    return Pictures(n, read, names, resolution, n_colours, flip=flip)


_Source = tuple[int, Callable[[int], tuple[Any, int]], tuple[str, ...]]


def _from_folder(folder: Path) -> _Source:
    from PIL import Image

    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise PictureError(f"{folder} has no {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} images")
    tops = [path.relative_to(folder).parts for path in files]
    names = tuple(sorted({parts[0] for parts in tops})) if all(len(parts) > 1 for parts in tops) else ("",)
    places = {name: number for number, name in enumerate(names)}
    numbers = [places.get(parts[0], 0) for parts in tops]

    def read(index: int) -> tuple[Any, int]:
        try:
            with Image.open(files[index]) as image:
                return _plain(image), numbers[index]
        except Exception as error:  # damaged images raise many kinds
            raise PictureError(f"{files[index]} is not a readable image: {error}") from error

    return len(files), read, names


def _from_npz(path: Path) -> _Source:
    from PIL import Image

    if path.exists() and not path.is_file():  # a pipe would be read for ever
        raise PictureError(f"{path} is not a file")
    try:
        with numpy.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files if name in ("images", "labels")}
    except Exception as error:  # damaged archives raise many kinds
        raise PictureError(f"{path} cannot be read: {error}") from error
    if "images" not in arrays:
        raise PictureError(f"{path} has no array 'images'")
    images = arrays["images"]
    if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    if images.ndim == 4 and images.shape[3] == 1:
        images = images[..., 0]
    if images.dtype != numpy.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        raise PictureError(
            f"{path}: images are {images.dtype} {images.shape}, they must be uint8 (n, H, W) or with 3 colours"
        )
    labels = arrays.get("labels", numpy.zeros(len(images), numpy.int64))
    if labels.shape != (len(images),) or not numpy.issubdtype(labels.dtype, numpy.integer):
        raise PictureError(
            f"{path}: labels are {labels.dtype} {labels.shape}, they must be class indices ({len(images)},)"
        )
    if not images.size:
        raise PictureError(f"{path} holds no images, or images without pixels: {images.shape}")
    _check_labels(labels.tolist(), str(path))

    def read(index: int) -> tuple[Any, int]:
        return Image.fromarray(images[index]), int(labels[index])

    return len(images), read, tuple(str(number) for number in range(int(labels.max()) + 1))


def _check_labels(labels: list[Any], where: str, n_classes: int | None = None) -> None:
    """Raise unless all labels are class indices."""
    most = MAX_CLASSES if n_classes is None else n_classes
    for place, label in enumerate(labels):
        if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < most:
            raise PictureError(f"{where}: label {place} is {label!r}, it must be a class index below {most:,}")


def _from_datasets(folder: Path) -> _Source:
    from PIL import Image

    try:
        import datasets

        rows = datasets.load_from_disk(str(folder))
    except ImportError as error:
        raise PictureError(f"{folder} needs datasets: pip install 'smyrf[biggan]'") from error
    except Exception as error:  # damaged files raise many kinds
        raise PictureError(f"{folder} cannot be loaded: {error}") from error
    if isinstance(rows, datasets.DatasetDict):
        if "train" not in rows:
            raise PictureError(f"{folder} has no split 'train'; it has {', '.join(rows)}")
        rows = rows["train"]
    if not len(rows):
        raise PictureError(f"{folder} holds no images")
    if "image" not in rows.column_names:
        raise PictureError(f"{folder} has no column 'image'; it has {', '.join(rows.column_names)}")
    has_labels = "label" in rows.column_names
    names: tuple[str, ...] = ("",)
    if has_labels:
        known = getattr(rows.features["label"], "names", None)
        labels = list(rows["label"])
        _check_labels(labels, str(folder), len(known) if known else None)
        names = tuple(known) if known else tuple(str(one) for one in range(max(labels) + 1))

    def read(index: int) -> tuple[Any, int]:
        try:
            row = rows[index]
            if not isinstance(row["image"], Image.Image):
                raise TypeError(f"it is {type(row['image']).__name__}")
            return _plain(row["image"]), row["label"] if has_labels else 0
        except Exception as error:  # damaged images raise many kinds
            raise PictureError(f"{folder}: image {index} is not a readable image: {error}") from error

    return len(rows), read, names


def _plain(image: Any) -> Any:
    """Convert a PIL image to what a viewer shows: upright, on white, with 8 bits."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits, which `convert` would clip at 255
        return Image.fromarray((numpy.asarray(image).astype(numpy.int64).clip(0, 65535) // 257).astype(numpy.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _fit(image: Any, resolution: int, n_colours: int) -> Tensor:
    """Crop a PIL image to a centred square and resize it: ``(colours, R, R)`` between −1 and 1."""
    from PIL import Image

    image = image.convert("L" if n_colours == 1 else "RGB")
    side = min(image.size)
    left, top = ((size - side) // 2 for size in image.size)
    if image.size != (resolution, resolution):
        box = (left, top, left + side, top + side)
        image = image.resize((resolution, resolution), Image.Resampling.LANCZOS, box=box)
    pixels = torch.from_numpy(numpy.array(image, dtype=numpy.float32)) / 127.5 - 1.0
    return pixels[None] if n_colours == 1 else pixels.permute(2, 0, 1)
