"""Small runs that tests of several rooms share: parity (the word problem of Z2) learnt by an LSTM of a few channels.

Without a GPU all tests run with Triton's interpreter, which must be chosen before anything imports Triton.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from lightning.pytorch import Trainer, seed_everything

from fprnn_lightning.mixers.lstm import LSTMMixer
from fprnn_lightning.tasks.csv_files import write_csv
from fprnn_lightning.tasks.word_problem import WordProblem
from fprnn_lightning.training import FixedLength, SequenceLearner, WarmupConstant


@pytest.fixture(scope="session")
def published_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what configs/task names of published files: data/a5 and data/catbAbI_v1.2, small ones."""
    folder = tmp_path_factory.mktemp("published")
    stories, words = folder / "data" / "catbAbI_v1.2", folder / "data" / "a5"
    stories.mkdir(parents=True)
    words.mkdir()
    task = WordProblem("A5", batch_size=8, train_length=50)
    for index, split in enumerate(("train", "validation", "test")):
        write_csv(words / f"{split}.csv", 0, [task.batch("train", index)])
        lines = [f"1\tjohn went home . where is john ? {place}\n" for place in ("home", "here") * 30]
        (stories / f"en-valid-10k_{split.replace('validation', 'valid')}.txt").write_text("".join(lines))
    return folder


@pytest.fixture
def small_task() -> Callable[..., WordProblem]:
    def make(**options):
        sizes = {"batch_size": 16, "train_length": 8, "validation_lengths": [4, 8], "test_lengths": [4, 8]}
        evaluation = {"validation_sequences": 24, "test_sequences": 24, "evaluation_batch_size": 16}
        return WordProblem("Z2", **sizes | evaluation | options)

    return make


@pytest.fixture
def small_learner() -> Callable[..., SequenceLearner]:
    def make(mixer=LSTMMixer, **options):
        seed_everything(0, verbose=False)
        sizes = {"vocab_size": 2, "width": 8, "validation_lengths": [4, 8], "test_lengths": [4, 8, 50]}
        course = {"curriculum": FixedLength(8), "schedule": WarmupConstant(2)}
        return SequenceLearner(mixer, **sizes | course | options)

    return make


@pytest.fixture
def small_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def make(**options):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        plain = {"enable_checkpointing": False, "num_sanity_val_steps": 0, "limit_val_batches": 0}
        endless = {"max_steps": 4, "check_val_every_n_epoch": None, "log_every_n_steps": 1}
        where = {"accelerator": "cpu", "default_root_dir": tmp_path}
        return Trainer(**quiet | plain | endless | where | options)

    return make
