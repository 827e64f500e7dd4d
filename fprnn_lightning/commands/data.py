"""A task's sequences as files."""

import os
import shutil
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np

from fprnn_lightning.tasks import SequenceTask
from fprnn_lightning.tasks.base import Batch, Split
from fprnn_lightning.tasks.csv_files import Rows, check_disjoint, read_csv, write_csv


def export(data: SequenceTask, output: Path, split: Split = "test", batches: int = 1) -> None:
    """Writes the labelled sequences of a task as CSV, in the format of the public generator of word problems.

    The columns are seed, input and target; tokens and labels are separated by spaces, a label of -100 is not scored.
    What comes after the last label of a sequence is left out. The task CsvFiles reads such files.

    Args:
        data: The task; --config configs/task/a5.yaml gives one too.
        output: CSV file to write; one that exists is replaced once the new one is complete.
        split: Which sequences: the validation or test set as a whole, or the beginning of the training stream.
        batches: How many batches of the training stream.

    Raises:
        ValueError: If the file cannot be written.
    """
    if batches < 1:
        raise ValueError(f"batches must be at least 1, got {batches}.")
    evaluation = {"validation": data.val_dataloader, "test": data.test_dataloader}
    sequences = evaluation[split]() if split in evaluation else (data.batch("train", i) for i in range(batches))
    try:
        write_csv(output, data.seed, sequences)
    except OSError as error:
        raise ValueError(f"output: cannot write {output}, {error.strerror}") from error


def import_(
    input: list[Path] | Path,
    output: Path,
    vocab_size: int,
    test_input: Path | None = None,
    validation_share: float = 0.1,
    test_share: float = 0.1,
) -> None:
    """Makes the three files that the task CsvFiles takes of published ones, once they have been checked line by line.

    A hash of a sequence says which file it goes into: one that occurs twice is in one file only, whatever it is
    imported with. The files are written in one form (columns seed, input and target, seed 0, a label for each token up
    to the last label, -100 where it is not scored).

    Args:
        input: CSV file in the format of the public generator of word problems (such as A5=16.csv), or a list of them.
        output: Folder to make, of train.csv, validation.csv and test.csv; it is there when all three are complete.
        vocab_size: Tokens and labels are below this number: 60 for A5, 120 for S5.
        test_input: CSV file of the test sequences (such as A5=20.csv); else they are taken from `input`.
        validation_share: Share of the sequences of `input` that go into validation.csv.
        test_share: Share of them that goes into test.csv, none if there is a `test_input`.

    Raises:
        ValueError: If a file cannot be read or is malformed, with the number of the line; a sequence of `test_input` is
            in `input` too; a share is out of range or leaves a file empty; or the folder exists or cannot be made.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, got {vocab_size}.")
    if not input:
        raise ValueError("input must name at least one file.")
    if test_input is not None:
        test_share = 0.0
    if validation_share < 0 or test_share < 0 or validation_share + test_share > 1:
        shares = f"{validation_share:g} and {test_share:g}"
        raise ValueError(f"validation_share and test_share must be shares, at most 1 together, got {shares}.")
    if output.exists():
        raise ValueError(f"output: {output} exists already.")
    files: dict[str, list[tuple[Rows, np.ndarray]]] = {"train": [], "validation": [], "test": []}
    for path in [input] if isinstance(input, Path) else input:
        rows = read_csv(path, vocab_size)
        places = np.searchsorted([validation_share, validation_share + test_share], hashes(rows), "right")
        for place, name in enumerate(("validation", "test", "train")):
            files[name].append((rows, np.flatnonzero(places == place)))
    if test_input is not None:
        test = read_csv(test_input, vocab_size)
        for rows, _ in files["train"]:
            check_disjoint([rows, test])
        files["test"] = [(test, np.arange(len(test.lines)))]
    counts = {name: sum(len(chosen) for _, chosen in parts) for name, parts in files.items()}
    for name, count in counts.items():
        if not count:
            raise ValueError(f"No sequence goes into {name}.csv, of {sum(counts.values())}: its share must be larger.")
    temporary = output.parent / f".{output.name}.{os.getpid()}"
    try:
        temporary.mkdir()
        for name, parts in files.items():
            write_csv(temporary / f"{name}.csv", 0, blocks(parts))
        temporary.rename(output)
    except OSError as error:
        raise ValueError(f"output: cannot make {output}, {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{output}: {', '.join(f'{count} sequences in {name}.csv' for name, count in counts.items())}")


def hashes(rows: Rows) -> np.ndarray:
    """A number of each sequence that looks random, (R,) in [0, 1)."""
    digests = (
        blake2b(tokens[:length].tobytes(), digest_size=8).digest()
        for tokens, length in zip(rows.tokens, rows.lengths, strict=True)
    )
    return np.frombuffer(b"".join(digests), "<u8") / 2.0**64


def blocks(parts: list[tuple[Rows, np.ndarray]]) -> Iterator[Batch]:
    """The chosen sequences of each file, a few thousand at a time."""
    for rows, chosen in parts:
        for some in np.array_split(chosen, len(chosen) // 4096 + 1):
            yield rows.batch(some, rows.tokens.shape[1])
