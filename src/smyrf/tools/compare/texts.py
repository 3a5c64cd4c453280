"""Documents of a text file, as token ids."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from smyrf.tools.compare.input_files import InputError

SUFFIXES = (".txt", ".md", ".rst", ".jsonl")
# Documents per call of a tokenizer, and characters per token it is given: a book is not tokenized to its end.
_AT_ONCE, _CHARACTERS = 64, 64


def read_documents(path: Path) -> Iterator[str]:
    """Documents of a file, without empty ones.

    In a .jsonl file each line is an object with a field "text". In a .txt, .md or .rst file each line is a document; if
    there are blank lines, each paragraph is. Files may be compressed with gzip, as .gz.

    Raises:
        InputError: says what is wrong, and in which line.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    kind = suffixes[-2 if packed else -1] if len(suffixes) > packed else ""
    if kind not in SUFFIXES:
        raise InputError(f"it must be one of {', '.join(SUFFIXES)}, or one of these followed by .gz")
    if not path.is_file():
        raise InputError("it is not a file")
    found = False
    try:
        opened: Any = gzip.open if packed else open
        with opened(path, "rt", encoding="utf-8") as file:
            for text in _json_lines(file) if kind == ".jsonl" else _paragraphs(file):
                found = found or bool(text)
                if text:
                    yield text
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"it cannot be read: {error}") from error
    if not found:
        raise InputError("it holds no text")


def choose_documents(
    texts: Iterable[str], tokenizer: Any, n_documents: int, length: int, found: Any = lambda n: None
) -> list[list[int]]:
    """Token ids of the first documents with at least `length` tokens, truncated to it; if too few, the longest others.

    Args:
        tokenizer: of the model.
        found: called with the number of long documents so far.
    """
    if length <= tokenizer.num_special_tokens_to_add():
        raise ValueError(f"{length=} leaves no place for text")
    long: list[list[int]] = []
    short: list[list[int]] = []
    texts = iter(texts)
    while len(long) < n_documents and (some := list(islice(texts, _AT_ONCE))):
        some = [text[: _CHARACTERS * length] for text in some]
        for ids in tokenizer(some, truncation=True, max_length=length, verbose=False)["input_ids"]:
            (long if len(ids) == length else short).append(ids)
        short.sort(key=len, reverse=True)
        del short[n_documents:]
        found(min(len(long), n_documents))
    return (long + [ids for ids in short if ids])[:n_documents]


def _json_lines(file: IO[str]) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"line {number} is not JSON: {error}") from error
        text = data.get("text") if isinstance(data, dict) else None
        if not isinstance(text, str):
            raise InputError(f'line {number} is not an object with a field "text" that is a string')
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"line {number} holds half of a surrogate pair, which is no character") from error
        yield text.strip()


def _paragraphs(file: IO[str]) -> Iterator[str]:
    lines = file.read().strip().split("\n")
    if all(line.strip() for line in lines):
        yield from (line.strip() for line in lines)
        return
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []
