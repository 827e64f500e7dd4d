"""A task's sequences as files."""

from pathlib import Path

from fprnn_lightning.tasks import SequenceTask
from fprnn_lightning.tasks.base import Split
from fprnn_lightning.tasks.csv_files import write_csv


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
