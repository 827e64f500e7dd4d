"""Labelled sequences in CSV files, as the public generator of word problems writes them, a header and a row each,

    seed,input,target
    0,3 5 6,3 1 0

`input` holds the tokens and `target` the labels, separated by spaces: as many labels as tokens, or one, of the last. A
label of -100 is not scored. The seed, and whatever other columns there are, are not read.

Source: the format of https://github.com/jopetty/word-problem.
"""

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fprnn_lightning.tasks.base import Batch, SequenceTask, Split
from fprnn_lightning.whole_files import write_whole

COLUMNS = ("seed", "input", "target")
IGNORED = -100


class CsvFiles(SequenceTask):
    """Sequences from CSV files, such as published word problems: columns input and target, ids separated by spaces.

    `data import` makes the three files of published ones, `data export` one of any task.

    An example row, and what is made of it::

        0,3 5 6 0 2,3 1 0 0 2

        tokens   3  5  6  0  2
        targets  3  1  0  0  2

    Training draws rows of its file at random, with replacement. The evaluation sets are the first rows of theirs, in
    order, whatever the seed. Sequences are cut to `train_length` and the longest evaluated length; shorter ones are
    filled up with token 0, not scored. No two files may share a sequence. A curriculum can cut them only if every
    position of the training file is labelled.

    Labels are taken as they are. The public generator numbers the permutations of S<n> as `groups` does, those of A<n>
    perhaps not, and multiplies them the other way round, "x_t, then what came before": a model trained on its files
    fails on those of WordProblem.

    Args:
        train_file: CSV file to train on.
        validation_file: CSV file of the validation set.
        test_file: CSV file of the test set.
        vocab_size: Tokens and labels are below this number: 60 for A5, 120 for S5.
        **shared: The options of every task. Of lengths and numbers of sequences to evaluate, those count that the files
            have.

    Raises:
        ValueError: If a file cannot be read, is empty or malformed, holds ids beyond the vocabulary or a sequence of
            another file, or is shorter than asked for, with the number of the line; or a shared option is out of range.
    """

    def __init__(
        self, train_file: Path, validation_file: Path, test_file: Path, vocab_size: int, **shared: Any
    ) -> None:
        super().__init__(**shared)
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}.")
        self._vocab_size = vocab_size
        files = (train_file, validation_file, test_file)
        self._rows = {
            split: read_csv(path, vocab_size)
            for split, path in zip(("train", "validation", "test"), files, strict=True)
        }
        check_disjoint(self._rows.values())
        train, validation, test = self._rows.values()
        if self.train_length > train.tokens.shape[1]:
            longest = train.tokens.shape[1]
            raise ValueError(f"train_length is {self.train_length}, but the longest row of {train.path} has {longest}.")
        unlabelled = (train.targets[:, : self.train_length] == IGNORED).all(1)
        if unlabelled.any():
            where = f"{train.path}, line {train.lines[unlabelled.argmax()]}"
            raise ValueError(f"{where}: no label within the first {self.train_length} tokens (train_length).")
        self.prefix_closed = bool(((train.targets != IGNORED).sum(1) == train.lengths).all())
        self.validation_lengths = validation.reached("validation_lengths", self.validation_lengths)
        self.test_lengths = test.reached("test_lengths", self.test_lengths)
        self.validation_sequences = min(self.validation_sequences, len(validation.lines))
        self.test_sequences = min(self.test_sequences, len(test.lines))
        validation.check_labels("validation_lengths", self.validation_lengths[-1], self.validation_sequences)
        test.check_labels("test_lengths", self.test_lengths[-1], self.test_sequences)

    @property
    def name(self) -> str:
        path = self._rows["train"].path.absolute()
        return (path.parent.name if path.stem == "train" else path.stem).lower()  # data/a5/train.csv is of a5

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def generate(self, generator: np.random.Generator, split: Split, sequences: int, length: int) -> Batch:
        return self._rows[split].batch(generator.integers(len(self._rows[split].lines), size=sequences), length)

    def _draw(self, split: Split, index: int, sequences: int, length: int) -> Batch:
        if split == "train":
            return super()._draw(split, index, sequences, length)
        return self._rows[split].batch(slice(index * sequences, (index + 1) * sequences), length)


@dataclass(frozen=True, eq=False)
class Rows:
    """What a CSV file holds, R sequences of L tokens at most.

    Args:
        path: The file.
        lines: (R,) the number of each sequence's line.
        lengths: (R,) tokens of each sequence.
        tokens: (R, L) int32, filled up with 0.
        targets: (R, L) int32, filled up with -100.
    """

    path: Path
    lines: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    targets: np.ndarray

    def batch(self, rows: np.ndarray | slice, length: int) -> Batch:
        """Some of the sequences, cut to a length: tokens and targets, both int64."""
        return tuple(torch.from_numpy(part[rows, :length]).long().contiguous() for part in (self.tokens, self.targets))

    def reached(self, option: str, lengths: list[int]) -> list[int]:
        """Those of the lengths that some sequence has; raises ValueError if none."""
        reached = [length for length in lengths if length <= self.tokens.shape[1]]
        if not reached:
            raise ValueError(f"{option} are {lengths}, but the longest row of {self.path} has {self.tokens.shape[1]}.")
        return reached

    def check_labels(self, option: str, length: int, sequences: int) -> None:
        """Raises ValueError if none of the first sequences has a label within a length."""
        if (self.targets[:sequences, :length] == IGNORED).all():
            raise ValueError(f"{self.path}: no sequence has a label within the first {length} tokens ({option}).")


def read_csv(path: Path, vocab_size: int) -> Rows:
    """Reads labelled sequences.

    Raises:
        ValueError: If the file cannot be read or holds anything else, with the number of the line.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read, {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: this is no text in UTF-8.") from error
    known = {"input": set(range(vocab_size)), "target": {*range(vocab_size), IGNORED}}
    lines, sequences, labels = [], [], []
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        if missing := [name for name in COLUMNS[1:] if name not in header]:
            raise ValueError(f"the header must have the columns input and target, lacks {' and '.join(missing)}")
        columns = [header.index(name) for name in COLUMNS[1:]]
        for row in filter(None, reader):
            if len(row) != len(header):
                raise ValueError(f"{len(row)} columns where the header has {len(header)}")
            tokens, targets = (
                _parse(name, row[column], ids) for column, (name, ids) in zip(columns, known.items(), strict=True)
            )
            if len(targets) not in (len(tokens), 1):
                raise ValueError(f"{len(targets)} labels in target for {len(tokens)} tokens in input")
            if set(targets) == {IGNORED}:
                raise ValueError(f"target has no label but {IGNORED}")
            lines.append(reader.line_num)
            sequences.append(tokens)
            labels.append([IGNORED] * (len(tokens) - len(targets)) + targets)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}, line {max(reader.line_num, 1)}: {error}.") from error
    if not lines:
        raise ValueError(f"{path}, line 1: nothing but a header, one sequence a row is needed.")
    lengths = np.array([len(tokens) for tokens in sequences])
    inside = np.arange(lengths.max()) < lengths[:, None]
    padded = np.zeros(inside.shape, np.int32), np.full(inside.shape, IGNORED, np.int32)
    for array, parts in zip(padded, (sequences, labels), strict=True):
        array[inside] = np.concatenate(parts)
    return Rows(path, np.array(lines), lengths, *padded)


def _parse(column: str, text: str, ids: set[int]) -> list[int]:
    words = text.split()
    if not words:
        raise ValueError(f"{column} is empty")
    try:
        elements = [int(word) for word in words]
    except ValueError:
        raise ValueError(f"{column} must be whole numbers separated by spaces, is {text[:40]!r}") from None
    if not ids.issuperset(elements):
        wrong = next(element for element in elements if element not in ids)
        raise ValueError(f"{column} has {wrong}, beyond 0 to {max(ids)} (vocab_size)")
    return elements


def check_disjoint(files: Iterable[Rows]) -> None:
    """Raises ValueError if a sequence is in two files."""
    found: dict[bytes, tuple[Path, int]] = {}
    for rows in files:
        keys = [tokens[:length].tobytes() for tokens, length in zip(rows.tokens, rows.lengths, strict=True)]
        for key, line in zip(keys, rows.lines, strict=True):
            if key in found:
                path, other = found[key]
                raise ValueError(f"{rows.path}, line {line}: this sequence is in {path} too, line {other}.")
        found |= {key: (rows.path, line) for key, line in zip(keys, rows.lines, strict=True)}


def write_csv(path: Path, seed: int, batches: Iterable[Batch]) -> None:
    """Writes labelled sequences, each up to its last label, if it has any; the file is there when it is complete.

    Args:
        path: The file; one that exists is replaced.
        seed: What goes into the column seed.
        batches: Tokens (B, T) and targets (B, T).

    Raises:
        OSError: If the file cannot be written.
    """

    def write(partial: Path) -> None:
        with partial.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            for batch in batches:
                for tokens, targets in zip(*(part.numpy() for part in batch), strict=True):
                    end = np.flatnonzero(targets != IGNORED).max(initial=-1) + 1
                    cells = [" ".join(map(str, part[:end].tolist())) for part in (tokens, targets)]
                    if end:
                        writer.writerow([seed, *cells])

    write_whole(path, write)
