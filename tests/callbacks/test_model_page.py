"""The page of TensorBoard that says what a run's model is."""

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fprnn_lightning.callbacks import ModelPage
from fprnn_lightning.callbacks.model_page import model_table
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.diagonal import DiagonalMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.lstm import LSTMMixer


def _cells(markdown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in markdown.splitlines() if line[:1] == "|"]


def test_it_shows_the_model_and_the_configuration(small_learner, small_task, small_trainer, tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="run_0")
    learner = small_learner(mixer=FixedPointMixer, layers=2)
    trainer = small_trainer(callbacks=[ModelPage("seed_everything: 0\nmodel: {}\n")], logger=logger)
    trainer.fit(learner, small_task())
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir).Reload()
    (page,) = events.Tensors("model/text_summary")
    text = page.tensor_proto.string_val[0].decode()
    assert text.startswith(model_table(learner, 8)) and text.endswith(
        "\n\n```yaml\nseed_everything: 0\nmodel: {}\n```\n"
    )
    head, _, *rows, total = _cells(text)
    assert head == [
        "part",
        "parameters",
        "FLOPs",
        "FLOPs of an iteration",
        "FLOPs with 32 iterations",
        "state in bytes",
    ]
    assert [row[0] for row in rows] == ["embedding", "layer 0, fixed_point", "layer 1, fixed_point", "head"]
    assert int(total[1].replace(",", "")) == sum(parameter.numel() for parameter in learner.parameters())
    once, each, most = (int(cell.replace(",", "")) for cell in total[2:5])
    assert most == once + 32 * each
    assert total[5] == f"{2 * 3 * 16 * 4}"


@pytest.mark.parametrize("mixer", [DiagonalMixer, DenseMixer, LSTMMixer])
def test_mixers_that_do_not_iterate_have_one_number(small_learner, mixer):
    head, *_ = _cells(model_table(small_learner(mixer=mixer), 8))
    assert head == ["part", "parameters", "FLOPs", "state in bytes"]
