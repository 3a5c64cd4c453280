"""Documents of a text file, as token ids."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from smyrf.tools.compare.input_files import InputError
from smyrf.tools.encoders import tokenize

SUFFIXES = (".txt", ".md", ".rst", ".jsonl")
# Characters of one document, and of all documents that are read until enough of them are long: a small .gz file may
# hold gigabytes.
LONGEST_DOCUMENT, MOST_CHARACTERS = 1 << 24, 1 << 27
# Documents per call of a tokenizer, and characters per token it is given: a book is not tokenized to its end.
_AT_ONCE, _CHARACTERS = 64, 64


def read_documents(path: Path) -> Iterator[str]:
    """Documents of a file, without empty ones.

    In a .jsonl file each line is an object with a field "text". In a .txt, .md or .rst file each line is a document; if
    there are blank lines among the first `LONGEST_DOCUMENT` characters, each paragraph is. Files may be compressed with
    gzip, as .gz, and are read no further than documents are taken.

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
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
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
    starts = (text[: _CHARACTERS * length] for text in texts)
    while len(long) < n_documents and (some := list(islice(starts, _AT_ONCE))):
        for ids in tokenize(tokenizer, some, truncation=True, max_length=length):
            (long if len(ids) == length else short).append(ids)
        short.sort(key=len, reverse=True)
        del short[n_documents:]
        found(min(len(long), n_documents))
    return (long + [ids for ids in short if ids])[:n_documents]


def _json_lines(file: IO[str]) -> Iterator[str]:
    for number, line in _lines(file):
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
    by_line = re.search(r"\n\s*\n", file.read(LONGEST_DOCUMENT).strip()) is None
    file.seek(0)
    paragraph: list[str] = []
    size = 0
    for number, line in _lines(file):
        if by_line:
            yield line.strip()
        elif line.strip():
            paragraph.append(line.rstrip("\n"))
            size += len(line)
            if size > LONGEST_DOCUMENT:
                first = number - len(paragraph) + 1
                raise InputError(f"the paragraph at line {first:,} has more than {LONGEST_DOCUMENT:,} characters")
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph, size = [], 0
    if paragraph:
        yield "\n".join(paragraph)


def _lines(file: IO[str]) -> Iterator[tuple[int, str]]:
    """Numbered lines of a file, from 1."""
    number = n_read = 0
    while line := file.readline(LONGEST_DOCUMENT + 1):
        number += 1
        n_read += len(line)
        if len(line) > LONGEST_DOCUMENT:
            raise InputError(f"line {number:,} has more than {LONGEST_DOCUMENT:,} characters")
        if n_read > MOST_CHARACTERS:
            raise InputError(
                f"its first {MOST_CHARACTERS:,} characters hold too few documents of the length asked for: give a "
                "smaller file, or ask for fewer or shorter documents"
            )
        yield number, line
