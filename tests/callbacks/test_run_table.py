"""A run's row in TensorBoard's HPARAMS table, read back from its events."""

import itertools

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from fprnn_lightning.callbacks import RunTable, Throughput
from fprnn_lightning.callbacks.run_table import CHOSEN
from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.cli import main
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.solvers.caps import RandomCap


@pytest.fixture
def logger(tmp_path):
    return TensorBoardLogger(tmp_path, name="", version="run_0")


@pytest.fixture
def events(logger):
    def read() -> EventAccumulator:
        logger.experiment.flush()
        return EventAccumulator(logger.log_dir).Reload()

    return read


def _content(events: EventAccumulator, tag: str) -> HParamsPluginData:
    return HParamsPluginData.FromString(events.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content)


def _chosen(events: EventAccumulator) -> dict[str, str | float]:
    values = _content(events, "session_start_info").session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


def test_what_was_chosen_is_there_when_training_starts(small_learner, small_task, small_trainer, logger, events):
    """Of a run that never ends, too."""

    class Stopped(Exception):
        pass

    class Stop(RunTable):
        def on_train_batch_start(self, *args):
            raise Stopped

    learner = small_learner(
        mixer=lambda width: FixedPointMixer(
            width, channel_mixer=lambda channels: Householder(channels, rank=2), train_iterations=RandomCap(seed=3)
        ),
        layers=2,
    )
    with pytest.raises(Stopped):
        small_trainer(callbacks=[Stop()], logger=logger).fit(learner, small_task())
    assert _chosen(events()) == {
        "task": "z2",
        "mixer": "fixed_point",
        "core": "GatedDiagonal",
        "channel_mixer": "Householder",
        "rank": 2,
        "solver": "Picard",
        "iterations": "RandomCap(mean=4.0, shape=4.0, seed=3)",
        "gradient": "Implicit",
        "length": 8,
        "width": 8,
        "layers": 2,
        "parameters": sum(parameter.numel() for parameter in learner.parameters()),
        "learning_rate": 0.002,
        "seed": 0,
    }
    columns = _content(events(), "experiment").experiment
    assert [column.name for column in columns.hparam_infos] == list(CHOSEN)
    final = [f"final/{name}" for name in ("solved_length", "steps", "minutes", "tokens_per_second")]
    tests = [f"test/sequence_accuracy_{length}" for length in (4, 8, 50)]
    assert [column.name.tag for column in columns.metric_infos] == [*final, *tests]
    assert not [tag for tag in events().Tags()["scalars"] if tag.startswith("final/")]
    assert "_hparams_/session_end_info" not in events().summary_metadata


def test_what_a_mixer_has_not_is_left_out(small_learner, small_task, small_trainer, logger, events):
    small_trainer(callbacks=[RunTable()], logger=logger, max_steps=1).fit(small_learner(), small_task())
    absent = {"core", "channel_mixer", "rank", "solver", "iterations", "gradient"}
    assert set(_chosen(events())) == set(CHOSEN) - absent


@pytest.mark.parametrize(("accuracies", "solved"), [((1.0, 0.9, 0.8), 8), ((0.0, 0.5, 0.899), 0), ((0.9,) * 3, 50)])
def test_what_came_of_it_is_there_after_the_test(
    small_learner, small_task, small_trainer, logger, events, monkeypatch, accuracies, solved
):
    clock = itertools.count(0, 90)  # seconds, read when training starts and when it ends
    monkeypatch.setattr("fprnn_lightning.callbacks.run_table.perf_counter", lambda: next(clock))
    learner = small_learner()
    results = learner.test_results
    monkeypatch.setattr(learner, "test_results", lambda: results() | {"sequence_accuracy": accuracies})
    trainer = small_trainer(callbacks=[Throughput(), RunTable()], logger=logger)
    trainer.fit(learner, small_task())
    speed = trainer.callback_metrics["train/tokens_per_second"].item()
    trainer.test(learner, small_task(), verbose=False)
    expected = {"solved_length": solved, "steps": 4, "minutes": 1.5, "tokens_per_second": speed}
    found = events()
    logged = {tag: found.Scalars(tag) for tag in found.Tags()["scalars"] if tag.startswith("final/")}
    assert {tag: [(each.step, each.value) for each in points] for tag, points in logged.items()} == {
        f"final/{name}": [(4, pytest.approx(value))] for name, value in expected.items()
    }
    end = _content(found, "session_end_info").session_end_info
    assert end.status == api_pb2.STATUS_SUCCESS


def test_a_test_without_a_fit_has_no_row(small_learner, small_task, small_trainer, logger, events):
    small_trainer(callbacks=[RunTable()], logger=logger).test(small_learner(), small_task(), verbose=False)
    assert not [tag for tag in events().Tags()["scalars"] if tag.startswith("final/")]
    assert not [tag for tag in events().summary_metadata if tag.startswith("_hparams_")]


def test_a_run_that_goes_on_keeps_its_row_and_counts_its_minutes_on(
    small_learner, small_task, small_trainer, logger, events, monkeypatch, tmp_path
):
    clock = itertools.count(0, 60)
    monkeypatch.setattr("fprnn_lightning.callbacks.run_table.perf_counter", lambda: next(clock))

    class Keep(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "at.ckpt", weights_only=False)

    small_trainer(callbacks=[RunTable(), Keep()], logger=logger, max_steps=3).fit(small_learner(), small_task())
    before = _chosen(events())
    logger = TensorBoardLogger(tmp_path, name="", version="run_0", purge_step=2)
    trainer = small_trainer(callbacks=[RunTable()], logger=logger)
    learner = small_learner()
    trainer.fit(learner, small_task(), ckpt_path=tmp_path / "at.ckpt", weights_only=True)
    trainer.test(learner, small_task(), verbose=False)
    logger.experiment.flush()
    assert _chosen(events()) == before
    # one minute up to the checkpoint, one after it; what came between is lost and does not count
    assert [(each.step, each.value) for each in events().Scalars("final/minutes")] == [(4, 2.0)]
    assert [(each.step, each.value) for each in events().Scalars("final/steps")] == [(4, 4.0)]


def test_every_fit_of_the_command_line_has_a_row_and_a_page(tmp_path):
    sizes = {"group": "Z2", "batch_size": 4, "train_length": 16, "validation_sequences": 4, "test_sequences": 4}
    options = [f"--data.{name}={value}" for name, value in sizes.items()]
    trainer = ["--trainer.max_steps=2", f"--trainer.default_root_dir={tmp_path}", "--trainer.accelerator=cpu"]
    chosen = ["--data=WordProblem", "--model.mixer=DiagonalMixer", "--model.width=8", "--data.test_lengths=[16]"]
    assert main(["fit", *chosen, *options, *trainer]) == 0
    events = EventAccumulator(str(tmp_path / "z2" / "diagonal" / "run_0")).Reload()
    values = _chosen(events)
    assert (values["task"], values["mixer"], values["core"]) == ("z2", "diagonal", "GatedDiagonal")
    assert events.Scalars("final/steps")[0].value == 2
    assert (
        b"class_path: fprnn_lightning.mixers.diagonal.DiagonalMixer"
        in (events.Tensors("model/text_summary")[0].tensor_proto.string_val[0])
    )
    assert events.Tags()["histograms"] == ["test/solver/layer_0/decay"]
