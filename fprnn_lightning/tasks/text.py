"""Text: read bytes, say the next one.

Files are mapped into memory, never read into it. The parts of all files that belong to a split lie end to end on a
ring, a separator before each; a context is a stretch of it, from any byte on.

    bits per byte = mean over the scored bytes of -log2 p(byte)
"""

import codecs
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from glob import glob
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fprnn_lightning.tasks.base import Batch, Split
from fprnn_lightning.tasks.contexts import ContextTask

SEPARATOR = 255  # is no byte of UTF-8
IGNORED = -100
LINE = 4096  # bytes in which the end of a line is looked for
CHUNK = 2**22  # bytes checked at a time


class Text(ContextTask):
    """Text in files of UTF-8, to be continued byte by byte: a language model in bits per byte.

    An example row, across the end of a file (the separator _ is byte 255)::

        tokens   e  n  d     .  _  O  n  c
        targets  n  d  .  -100  O  n  c  e

    The last bytes of every file are for test, those before for validation, and the rest is for training; cuts are at
    the end of a line, or between characters if lines are longer than 4096 bytes. No byte is in two splits. What
    repeats in the text itself, repeats in the splits.

    The pieces of a split are packed end to end, in the order of the files' names, on a ring: a context may begin
    anywhere, runs on into the next file, and from the last into the first. A separator precedes each piece. It is
    read, but never a target, so that the bits per byte are of the text alone.

    Training contexts begin at random. Those of evaluation are spread evenly over the ring, whatever the seed, so that
    all bytes count about equally. Every byte of a context is scored, the first ones with little to go by; the accuracy
    by length says how much context helps.

    Args:
        files: A file; a folder, of which it is all *.txt in it and below; a pattern such as 'corpus/**/*.md'; or a list
            of these. null is for the modules of Python's standard library, some megabytes which every computer that
            runs this has, and which differ between versions of Python.
        validation_share: Of the bytes of each file, for validation.
        test_share: Of the bytes of each file, for test, the last ones.
        train_length: Bytes of a training context.
        validation_lengths: Lengths, in bytes, at which validation measures; all are prefixes of the longest.
        test_lengths: The same for test; 50 is added.
        evaluation_batch_size: Validation and test contexts per batch, at most.
        **shared: The options of every task.

    Raises:
        ValueError: If there is no such file, it cannot be read, is empty or not in UTF-8 (with the place of the byte);
            a split is shorter than a context; or an option is out of range.
    """

    name = "text"
    vocab_size = 256
    unit = "byte"

    def __init__(
        self,
        files: list[str] | str | None = None,
        validation_share: float = 0.05,
        test_share: float = 0.05,
        train_length: int = 256,
        validation_lengths: Sequence[int] = (256,),
        test_lengths: Sequence[int] = (64, 128, 256, 512),
        evaluation_batch_size: int = 64,
        **shared: Any,
    ) -> None:
        super().__init__(
            train_length=train_length,
            validation_lengths=validation_lengths,
            test_lengths=test_lengths,
            evaluation_batch_size=evaluation_batch_size,
            **shared,
        )
        if min(validation_share, test_share) <= 0 or validation_share + test_share >= 1:
            shares = f"{validation_share:g} and {test_share:g}"
            raise ValueError(f"validation_share and test_share must be above 0 and below 1 together, got {shares}.")
        ends = (1 - validation_share - test_share, 1 - test_share, 1.0)
        parts: dict[Split, list[Part]] = {"train": [], "validation": [], "test": []}
        mapped.cache_clear()  # files may have changed since another task read them
        for path in map(os.path.abspath, find_files(files)):
            cuts = [0, *(cut(mapped(path), share) for share in ends)]
            for pieces, (first, last) in zip(parts.values(), pairwise(cuts), strict=True):
                pieces += [Part(path, first, last)] if first < last else []
        self._rings = {split: Ring(tuple(pieces)) for split, pieces in parts.items()}
        longest = {"train_length": train_length, "validation_lengths": max(validation_lengths)}
        longest["test_lengths"] = self.test_lengths[-1]
        for (split, ring), (option, length) in zip(self._rings.items(), longest.items(), strict=True):
            if ring.size <= length:
                raise ValueError(
                    f"The files have {ring.size} bytes for {split}, too few for a context of {length} ({option})."
                )

    @classmethod
    def read_prompt(cls, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    @classmethod
    def show(cls, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    def places(self, split: Split) -> int:
        return self._rings[split].size

    def contexts(self, split: Split, places: np.ndarray, length: int) -> Batch:
        read = np.stack([self._rings[split].read(place, length + 1) for place in places.tolist()])
        tokens, targets = (torch.from_numpy(part).long() for part in (read[:, :-1], read[:, 1:]))
        return tokens, targets.masked_fill_(targets == SEPARATOR, IGNORED)


@dataclass(frozen=True)
class Part:
    """The bytes of a file from `first` to before `last`."""

    path: str
    first: int
    last: int


class Ring:
    """Parts of files end to end, a separator before each, and the first again after the last.

    Args:
        parts: None of them empty.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        ends = np.cumsum([1 + part.last - part.first for part in parts], dtype=np.int64)
        self.starts = np.concatenate([[0], ends])[:-1]
        self.size = int(ends[-1]) if parts else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """The `count` bytes from `start` on: (count,) uint8."""
        read = np.full(count, SEPARATOR, np.uint8)
        number = int(self.starts.searchsorted(start, "right")) - 1
        place = int(self.starts[number]) - start  # of the part's separator in what is read
        while place < count:
            part = self.parts[number % len(self.parts)]
            text = mapped(part.path)[part.first : part.last]
            first = max(place + 1, 0)
            wanted = text[first - place - 1 : count - place - 1]
            read[first : first + len(wanted)] = wanted
            place += 1 + len(text)
            number += 1
        return read


@lru_cache(maxsize=256)  # fewer than the files that a process may have open
def mapped(path: str) -> np.ndarray:
    """The bytes of a file that is not empty, (size,) uint8, read from the disk as they are looked at."""
    return np.asarray(np.memmap(path, np.uint8, "r"))


def find_files(files: list[str] | str | None) -> list[str]:
    """The paths of the files meant, sorted; of folders and patterns, those that are not empty.

    Raises:
        ValueError: If there is none, or one cannot be read, is empty or not in UTF-8.
    """
    if files is None:
        files = str(Path(os.__file__).parent / "*.py")  # the modules of Python's standard library
    found = set()
    for name in [files] if isinstance(files, str) else files:
        if not name:
            raise ValueError("files: an empty name, a file, folder or pattern is needed.")
        path = Path(name)
        if path.is_file():
            some = [path]
        else:
            some = path.rglob("*.txt") if path.is_dir() else map(Path, glob(name, recursive=True))
            some = [each for each in some if each.is_file() and each.stat().st_size]
        if not some:
            what = "the folder has no *.txt that is not empty" if path.is_dir() else "there is no such file"
            raise ValueError(f"files: {name}, {what}.")
        found |= {str(each) for each in some}
    if not found:
        raise ValueError("files must name at least one file.")
    found = sorted(found)
    for path in found:
        check_utf8(path)
    return found


def check_utf8(path: str) -> None:
    """Raises ValueError, with the place of the byte, if a file is empty, cannot be read or is not in UTF-8."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                read -= len(decoder.getstate()[0])  # the beginning of a character that the last chunk ended within
                decoder.decode(chunk)
                read = file.tell()
            if not read:
                raise ValueError(f"{path}: the file is empty.")
            read -= len(decoder.getstate()[0])
            decoder.decode(b"", final=True)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read, {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {read + error.start} is not UTF-8, {error.reason}.") from error


def cut(text: np.ndarray, share: float) -> int:
    """Where a text is cut, after about a share of it: at the end of a line, else between two characters."""
    place = round(share * len(text))
    if (line := text[place : place + LINE].tobytes().find(b"\n")) >= 0:
        return place + line + 1
    while place < len(text) and text[place] & 0b11000000 == 0b10000000:  # within a character
        place += 1
    return place
