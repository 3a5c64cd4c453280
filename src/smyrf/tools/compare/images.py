"""Images of a folder, or crops of a photograph that comes with matplotlib."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from smyrf.tools.compare.input_files import InputError, find_files

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
# Sides of the crops, in pixels.
_SIDES = (160, 400)


def read_images(folder: Path, n_images: int) -> list[Any]:
    """The first images of a folder and its subfolders, sorted by name, in RGB.

    Raises:
        InputError: it is not a folder with images, or a file in it is no image.
    """
    from PIL import Image

    images = []
    for path in find_files(folder, SUFFIXES)[:n_images]:
        try:
            with Image.open(path) as image:
                images.append(image.convert("RGB"))
        except Exception as error:  # decoders raise many kinds
            raise InputError(f"{path} is not a readable image: {error}") from error
    return images


def sample_images(n_images: int, seed: int) -> list[Any]:
    """Square crops of one photograph, at random positions and sizes."""
    from matplotlib.cbook import get_sample_data
    from PIL import Image

    with Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)) as image:
        photograph = image.convert("RGB")
    draw = random.Random(seed)
    crops = []
    for _ in range(n_images):
        side = draw.randint(*_SIDES)
        x, y = draw.randint(0, photograph.width - side), draw.randint(0, photograph.height - side)
        crops.append(photograph.crop((x, y, x + side, y + side)))
    return crops
