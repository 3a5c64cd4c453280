"""Sounds of a folder, or synthesised ones, at the sampling rate of a model.

Shapes: S samples, one channel.
"""

from __future__ import annotations

import importlib.util
import math
import wave
from pathlib import Path

import torch
from torch import Tensor

from smyrf.tools.compare.input_files import InputError, find_files

SUFFIXES = (".flac", ".mp3", ".ogg", ".wav")
# Seconds read of each sound, as in Whisper; and length of synthesised ones.
MOST_SECONDS, SAMPLE_SECONDS = 30, 10
# Zero crossings of the sinc on each side, and outputs computed at once.
_CROSSINGS, _AT_ONCE = 24, 1 << 16


def read_sounds(folder: Path, n_sounds: int, rate: int) -> list[Tensor]:
    """The first sounds of a folder and its subfolders, sorted by name: one channel, ``(S,)`` each, at `rate`.

    Raises:
        InputError: it is not a folder with sounds, or a file in it cannot be read.
    """
    return [resample(*read_sound(path), rate) for path in find_files(folder, SUFFIXES)[:n_sounds]]


def read_sound(path: Path) -> tuple[Tensor, int]:
    """Samples ``(S,)`` in [−1, 1], averaged over channels, and their rate.

    Python's own library reads WAV files with integer samples; all others need soundfile.

    Raises:
        InputError: names the file and what is wrong.
    """
    why = f"{path} is not a WAV file"
    if path.suffix.lower() == ".wav":
        try:
            return _read_wave(path)
        except (wave.Error, EOFError, OSError) as error:
            why = f"{path} is not a WAV file with integer samples ({error or 'it ends early'})"
    if importlib.util.find_spec("soundfile") is None:
        raise InputError(f"{why}, and others need soundfile: pip install 'smyrf[audio]'")
    import soundfile

    try:
        with soundfile.SoundFile(str(path)) as file:
            rate = _possible(path, file.samplerate)
            samples = torch.from_numpy(file.read(MOST_SECONDS * rate, dtype="float32", always_2d=True))
            return _not_empty(path, samples.mean(1)), rate
    except (RuntimeError, OSError, TypeError) as error:  # what soundfile raises on a broken file
        raise InputError(f"{path} cannot be read: {error}") from error


def resample(samples: Tensor, rate: int, wanted: int) -> Tensor:
    """Resample with a windowed sinc, keeping the frequencies that both rates can represent.

    Args:
        samples: ``(S,)``.

    Example:
        >>> sine = torch.sin(2 * torch.pi * 100 * torch.arange(8000) / 8000)
        >>> other = torch.sin(2 * torch.pi * 100 * torch.arange(11025) / 11025)
        >>> found = resample(sine, 8000, 11025)
        >>> found.shape, bool((found - other)[200:-200].abs().max() < 1e-3)
        (torch.Size([11025]), True)
    """
    if rate == wanted:
        return samples
    cutoff = 0.97 * min(1.0, wanted / rate)  # relative to the old Nyquist frequency; the rest is for the filter's slope
    reach = math.ceil(_CROSSINGS / cutoff)  # old samples on each side
    around = torch.arange(-reach, reach + 1)  # (2·reach + 1,)
    padded = torch.nn.functional.pad(samples, (reach, reach + 1))
    found = []
    length = math.ceil(len(samples) * wanted / rate)
    for start in range(0, length, _AT_ONCE):
        places = torch.arange(start, min(start + _AT_ONCE, length), dtype=torch.float64)  # (A,)
        at = places * rate / wanted  # in old samples
        first = at.floor()
        distance = (at - first)[:, None] - around  # (A, 2·reach + 1)
        window = torch.cos(distance.clamp(-reach, reach) * (torch.pi / 2 / reach)) ** 2
        weights = cutoff * torch.sinc(cutoff * distance) * window
        old = padded[(first.long() + reach)[:, None] + around]  # (A, 2·reach + 1)
        found.append((weights.to(old.dtype) * old).sum(1))
    return torch.cat(found)


def sample_sounds(n_sounds: int, rate: int, seed: int) -> list[Tensor]:
    """Synthesised sounds ``(S,)``: a sequence of notes with overtones, and a little noise.

    Example:
        >>> [len(sound) for sound in sample_sounds(2, 8000, seed=0)]
        [80000, 80000]
    """
    generator = torch.Generator().manual_seed(seed)
    n_notes = 4 * SAMPLE_SECONDS
    time = torch.arange(SAMPLE_SECONDS * rate // n_notes) / rate
    fade = torch.exp(-6 * time / time[-1])
    sounds = []
    for _ in range(n_sounds):
        pitches = 110 * 2 ** (torch.randint(36, (n_notes,), generator=generator) / 12)
        loudness = torch.rand(8, generator=generator) / torch.arange(1, 9)
        waves = torch.sin(2 * torch.pi * pitches[:, None, None] * torch.arange(1, 9)[:, None] * time)  # (notes, 8, S)
        melody = ((loudness[:, None] * waves).sum(1) * fade).flatten()
        sounds.append(0.3 * melody + 0.01 * torch.randn(len(melody), generator=generator))
    return sounds


def _read_wave(path: Path) -> tuple[Tensor, int]:
    with wave.open(str(path)) as file:
        rate, channels, width = _possible(path, file.getframerate()), file.getnchannels(), file.getsampwidth()
        raw = bytearray(file.readframes(MOST_SECONDS * rate))
    del raw[len(raw) - len(raw) % (channels * width) :]
    if not raw:
        raise InputError(f"{path} holds no sound")
    data = torch.frombuffer(raw, dtype=torch.uint8).view(-1, channels, width)  # little-endian
    if width == 1:  # the only unsigned width
        samples = data[..., 0].float() / 128 - 1
    else:
        top = data[..., -1].view(torch.int8).double()
        lower = [data[..., i].double() * 256.0 ** (i - width + 1) for i in range(width - 1)]
        samples = ((top + sum(lower)) / 128).float()
    return samples.mean(1), rate


def _possible(path: Path, rate: int) -> int:
    if not 100 <= rate <= 1_000_000:  # to resample from others would take any amount of memory
        raise InputError(f"{path} has {rate:,} samples in a second, which no sound has")
    return rate


def _not_empty(path: Path, samples: Tensor) -> Tensor:
    if len(samples) == 0:
        raise InputError(f"{path} holds no sound")
    return samples
