"""Ways to damage a file, and files that would run code or fill the memory if they were trusted."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch


class Opens:
    """Unpickled, it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return open, (self.marker, "w")


def _bytes(change: Callable[[bytes, random.Random], bytes]) -> Callable[[Path, Path], None]:
    def damage(path: Path, marker: Path) -> None:
        data = path.read_bytes() if path.is_file() else b""
        _replace(path).write_bytes(change(data, random.Random(len(data))))

    return damage


def _replace(path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def _flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(8 if data else 0):
        changed[chance.randrange(min(len(changed), 400))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _a_folder(path: Path, marker: Path) -> None:
    _replace(path).mkdir()


def _missing(path: Path, marker: Path) -> None:
    _replace(path)


def _loop(path: Path, marker: Path) -> None:
    _replace(path).symlink_to(path)


def _pipe(path: Path, marker: Path) -> None:
    os.mkfifo(_replace(path))


def _pickle(path: Path, marker: Path) -> None:
    _replace(path).write_bytes(pickle.dumps({"state": Opens(marker)}))


def _torch_pickle(path: Path, marker: Path) -> None:
    torch.save({"linear.weight": Opens(marker)}, str(_replace(path)))


def _old_torch_pickle(path: Path, marker: Path) -> None:
    torch.save({"linear.weight": Opens(marker)}, str(_replace(path)), _use_new_zipfile_serialization=False)


def _numpy_pickle(path: Path, marker: Path) -> None:
    """Arrays of objects, in a file that NumPy reads, as .npz or .npy."""
    inner = io.BytesIO()
    numpy.lib.format.write_array(inner, numpy.array([Opens(marker)], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(_replace(path), "w") as file:
        for name in ("images", "labels", "q", "k", "v"):
            file.writestr(f"{name}.npy", inner.getvalue())


def _script(path: Path, marker: Path) -> None:
    """A TorchScript network that writes a file when it runs."""

    class Writes(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.from_file(self.name, shared=True, size=8)
            return x.flatten(1)[:, :3]

    torch.jit.script(Writes(str(marker))).save(str(_replace(path)))


def _huge_array(path: Path, marker: Path) -> None:
    """Headers that promise a petabyte, on a few bytes."""
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000000,), }"
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"123"
    with zipfile.ZipFile(_replace(path), "w") as file:
        for name in ("images", "labels", "q", "k", "v"):
            file.writestr(f"{name}.npy", array)


def _zip_bomb(path: Path, marker: Path) -> None:
    """An array of 512 MiB of zeros in half a megabyte."""
    header = io.BytesIO()
    numpy.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 29,)})
    with zipfile.ZipFile(_replace(path), "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name in ("images", "q"):
            with file.open(f"{name}.npy", "w", force_zip64=True) as inner:
                inner.write(header.getvalue())
                for _ in range(512):
                    inner.write(bytes(1 << 20))


def _gzip_bomb(path: Path, marker: Path) -> None:
    """A line of 512 MiB in half a megabyte."""
    with gzip.open(_replace(path), "wb", compresslevel=1) as file:
        for _ in range(512):
            file.write(b"a " * (1 << 19))


def _safetensors_header(header: str | bytes, body: bytes = b"") -> Callable[[Path, Path], None]:
    def damage(path: Path, marker: Path) -> None:
        data = header.encode() if isinstance(header, str) else header
        _replace(path).write_bytes(len(data).to_bytes(8, "little") + data + body)

    return damage


def _text(text: str) -> Callable[[Path, Path], None]:
    return lambda path, marker: _replace(path).write_bytes(text.encode("utf-8", "surrogatepass")) and None


def _json_change(change: Callable[[Any], Any]) -> Callable[[Path, Path], None]:
    """Every leaf of a JSON file replaced."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(one) for key, one in value.items()}
        if isinstance(value, list):
            return [walk(one) for one in value]
        return change(value)

    def damage(path: Path, marker: Path) -> None:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        _replace(path).write_text("\n".join(json.dumps(walk(json.loads(line))) for line in lines))

    return damage


ANY = {
    "empty": _bytes(lambda data, chance: b""),
    "cut in half": _bytes(lambda data, chance: data[: len(data) // 2]),
    "cut by a byte": _bytes(lambda data, chance: data[:-1]),
    "cut to ten bytes": _bytes(lambda data, chance: data[:10]),
    "random": _bytes(lambda data, chance: chance.randbytes(3000)),
    "zeros": _bytes(lambda data, chance: bytes(len(data))),
    "bits flipped": _bytes(_flip),
    "a folder": _a_folder,
    "missing": _missing,
    "a link to itself": _loop,
    "pickle": _pickle,
    "PyTorch pickle": _torch_pickle,
}
# For files that a user names: nobody writes to the pipe, and the command must not wait for it.
NAMED = {**ANY, "a pipe": _pipe}
OBJECT = {
    "nested lists": _text("[" * 200_000),
    "nested objects": _text('{"a":' * 200_000),
    "nested and closed": _text('{"layers": ' + "[" * 5000 + "]" * 5000 + "}"),
    "null": _text("null"),
    "a list": _text("[]"),
    "an object": _text("{}"),
    "a string": _text('"text"'),
    "half a surrogate": _text('{"text": "\\ud800", "\\ud800": 1}'),
    "all numbers huge": _json_change(
        lambda x: 10**400 if isinstance(x, int | float) and not isinstance(x, bool) else x
    ),
    "all numbers 1e999": _json_change(lambda x: float("inf") if isinstance(x, int | float) else x),
    "all numbers NaN": _json_change(lambda x: float("nan") if isinstance(x, int | float) else x),
    "all numbers negative": _json_change(lambda x: -abs(x) - 1 if type(x) in (int, float) else x),
    "all leaves lists": _json_change(lambda x: [x]),
    "all leaves strings": _json_change(str),
    "all leaves null": _json_change(lambda x: None),
    "a number of 9999 digits": _text('{"text": ' + "9" * 9999 + "}"),
}
TEXT = {"not UTF-8": _bytes(lambda data, chance: data + b"\xff\xfe\xff"), "UTF-16": _text("\ufeffa\x00b\x00")}
GZIP = {"gzip bomb": _gzip_bomb, "two files": _bytes(lambda data, chance: data + data[: len(data) // 2])}
ARRAYS = {"NumPy pickle": _numpy_pickle, "a petabyte promised": _huge_array, "zip bomb": _zip_bomb}
TENSORS = {
    "header too long": _bytes(lambda data, chance: b"\xff" * 8 + data[8:]),
    "header not JSON": _safetensors_header("{]"),
    "header nested": _safetensors_header("[" * 100_000),
    "offsets negative": _safetensors_header('{"q":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}'),
    "offsets beyond": _safetensors_header('{"q":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}', b"1234"),
    "shape huge": _safetensors_header(
        '{"q":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}', b"1234"
    ),
    "no tensors": _safetensors_header("{}"),
}
WEIGHTS = {"old PyTorch pickle": _old_torch_pickle, "TorchScript": _script}
# A file of another kind is refused, whatever the reader.
MUST_REFUSE = (
    "empty",
    "random",
    "a folder",
    "missing",
    "a link to itself",
    "a pipe",
    "pickle",
    "PyTorch pickle",
    "NumPy pickle",
    "old PyTorch pickle",
    "TorchScript",
    "a petabyte promised",
    "nested lists",
    "nested objects",
    "null",
    "a string",
    "header not JSON",
    "offsets beyond",
)
