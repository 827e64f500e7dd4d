"""The run as one row of TensorBoard's HPARAMS table: what was chosen, from the first step on, and what came of it.

Every run declares the same columns, as TensorBoard takes those of whichever run it finds first.
"""

import os
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

CHOSEN = ("task", "mixer", "core", "channel_mixer", "rank", "solver", "iterations", "gradient")
CHOSEN += ("length", "width", "layers", "parameters", "learning_rate", "seed")
FIRST = ("task", "mixer", "core", "channel_mixer", "iterations")  # TensorBoard shows five until more are chosen
TEXTS = ("task", "mixer", "core", "channel_mixer", "solver", "gradient")
MEASURED = ("final/solved_length", "final/steps", "final/minutes", "final/tokens_per_second")
SOLVED = 0.9  # share of whole sequences


class RunTable(Callback):
    """Logs the run's choices when training starts, and `final/...` at the end of the test that follows it.

    `final/solved_length` is the longest test length with at least 90 % of whole sequences right, 0 if there is none;
    `final/steps` and `final/minutes` (validation included) are those that went into the weights, also before a run
    went on from a checkpoint; `final/tokens_per_second` is the last `train/tokens_per_second`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0  # of training, up to when it last started
        self.started: float | None = None
        self.speed: float | None = None
        self.measured: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.started = perf_counter()
        self.measured = {}
        metrics = [*MEASURED, *(f"test/sequence_accuracy_{length}" for length in pl_module.test_accuracy.lengths)]
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    _write_start(logger, chosen(trainer, pl_module), metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds, self.started = self._trained_seconds(), None
        self._note_speed(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.measured = {"final/steps": float(trainer.global_step), "final/minutes": self.seconds / 60}
        if self.speed is not None:
            self.measured["final/tokens_per_second"] = self.speed

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.measured:
            accuracies = pl_module.test_results()["sequence_accuracy"]
            by_length = zip(pl_module.test_accuracy.lengths, accuracies, strict=True)
            solved = [length for length, accuracy in by_length if accuracy >= SOLVED]
            measured = {"final/solved_length": float(max(solved, default=0)), **self.measured}
            pl_module.log_dict(measured, sync_dist=True)
            if trainer.is_global_zero:
                for logger in trainer.loggers:
                    if isinstance(logger, TensorBoardLogger):
                        _write_end(logger)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.measured = {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._note_speed(trainer)
        checkpoint["run_table"] = {"seconds": self._trained_seconds(), "speed": self.speed}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("run_table", {"seconds": 0.0, "speed": None})
        self.seconds, self.speed = saved["seconds"], saved["speed"]

    def _note_speed(self, trainer: Trainer) -> None:
        if "train/tokens_per_second" in trainer.callback_metrics:
            self.speed = trainer.callback_metrics["train/tokens_per_second"].item()

    def _trained_seconds(self) -> float:
        return self.seconds + (0.0 if self.started is None else perf_counter() - self.started)


def chosen(trainer: Trainer, pl_module: LightningModule) -> dict[str, str | int | float]:
    """What was chosen, by the names of the columns; what a run has not is left out."""
    blocks = pl_module.model.blocks
    values = {
        **blocks[0].mixer.describe(),
        "task": trainer.datamodule.name,
        "length": min(pl_module.curriculum.end, trainer.datamodule.trained_length),
        "width": blocks[0].mixer.width,
        "layers": len(blocks),
        "parameters": sum(parameter.numel() for parameter in pl_module.parameters()),
        "learning_rate": pl_module.learning_rate,
    }
    if "PL_GLOBAL_SEED" in os.environ:  # what seed_everything has set
        values["seed"] = int(os.environ["PL_GLOBAL_SEED"])
    return {name: values[name] for name in CHOSEN if name in values}


def _write_start(logger: TensorBoardLogger, values: dict[str, str | int | float], metrics: list[str]) -> None:
    from tensorboard.plugins.hparams import api_pb2, metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import SessionStartInfo

    kinds = {name: "DATA_TYPE_STRING" if name in TEXTS else "DATA_TYPE_FLOAT64" for name in CHOSEN}
    columns = api_pb2.Experiment(
        hparam_infos=[api_pb2.HParamInfo(name=name, type=kind, differs=name in FIRST) for name, kind in kinds.items()],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in metrics],
    )
    start = SessionStartInfo()
    for name, value in values.items():
        setattr(start.hparams[name], "string_value" if isinstance(value, str) else "number_value", value)
    _write(logger, metadata.EXPERIMENT_TAG, experiment=columns)
    _write(logger, metadata.SESSION_START_INFO_TAG, session_start_info=start)


def _write_end(logger: TensorBoardLogger) -> None:
    from tensorboard.plugins.hparams import api_pb2, metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import SessionEndInfo

    end = SessionEndInfo(status=api_pb2.STATUS_SUCCESS)
    _write(logger, metadata.SESSION_END_INFO_TAG, session_end_info=end)


def _write(logger: TensorBoardLogger, tag: str, **content: Any) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    description = metadata.create_summary_metadata(HParamsPluginData(**content))
    summary = Summary(value=[Summary.Value(tag=tag, metadata=description)])
    logger.experiment._get_file_writer().add_summary(summary)
