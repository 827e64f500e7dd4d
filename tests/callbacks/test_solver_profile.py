"""Figures, histogram and contraction of the layers that iterate, which leave the run as it would have been."""

import io
import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fprnn_lightning.callbacks import ModelPage, RunTable, SolverProfile, SolverReport
from fprnn_lightning.callbacks.solver_profile import draw_iterations, draw_positions
from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.mixers.base import Iteration, Profile
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.diagonal import DiagonalMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.lstm import LSTMMixer
from fprnn_lightning.solvers.caps import RandomCap

VALIDATING = {"limit_val_batches": 1.0, "val_check_interval": 4, "num_sanity_val_steps": 1}


class Expansive(Householder):
    """I - Q so many times too large."""

    def __init__(self, channels, times):
        super().__init__(channels)
        self.times = times

    def residual_apply(self, q, v):
        return self.times * super().residual_apply(q, v)


@pytest.fixture
def shown(small_learner, small_task, small_trainer, tmp_path):
    """Fits and tests, and reads the events back."""

    def run(mixer, layers=1) -> EventAccumulator:
        logger = TensorBoardLogger(tmp_path, name="", version="run_0")
        trainer = small_trainer(callbacks=[SolverProfile()], logger=logger, **VALIDATING)
        learner = small_learner(mixer=mixer, layers=layers)
        trainer.fit(learner, small_task())
        trainer.test(learner, small_task(), verbose=False)
        logger.experiment.flush()
        return EventAccumulator(logger.log_dir, {"images": 0, "histograms": 0}).Reload()

    return run


def _tags(events: EventAccumulator, kind: str) -> set[str]:
    return {tag for tag in events.Tags()[kind] if "/solver/" in tag}


def test_every_layer_that_iterates_is_shown_at_every_validation_and_at_the_test(shown):
    events = shown(FixedPointMixer, layers=2)
    prefixes = {f"{split}/solver/layer_{layer}" for split in ("validation", "test") for layer in (0, 1)}
    assert _tags(events, "images") == {
        f"{prefix}/residual_by_{axis}" for prefix in prefixes for axis in ("iteration", "position")
    }
    assert _tags(events, "histograms") == {f"{prefix}/decay" for prefix in prefixes}
    assert _tags(events, "scalars") == {
        f"{prefix}/{name}" for prefix in prefixes for name in ("contraction", "contraction_bound")
    }
    for tag in _tags(events, "images"):
        images = events.Images(tag)
        scalars = events.Scalars(tag.replace(tag.split("/")[-1], "contraction"))
        assert [image.step for image in images] == [scalar.step for scalar in scalars] and len(images) == 1
        with Image.open(io.BytesIO(images[-1].encoded_image_string)) as image:
            assert len(image.convert("RGB").getcolors(2**24)) > 10, "something is drawn"
    for prefix in prefixes:
        factors, bounds = (
            [event.value for event in events.Scalars(f"{prefix}/{name}")]
            for name in ("contraction", "contraction_bound")
        )
        assert all(0 < factor <= bound < 1 for factor, bound in zip(factors, bounds, strict=True))
        histogram = events.Histograms(f"{prefix}/decay")[0].histogram_value
        sequences, length, channels = 4, 8 if prefix.startswith("validation") else 50, 16
        assert histogram.num == sequences * length * channels and 0 < histogram.min <= histogram.max < 1


def test_other_mixers_show_what_they_have(shown):
    assert not _tags(shown(LSTMMixer), "histograms")


@pytest.mark.parametrize(("mixer", "scalars"), [(DiagonalMixer, 0), (DenseMixer, 4)])
def test_mixers_with_a_core_show_decays_and_contraction_if_they_mix(shown, mixer, scalars):
    events = shown(mixer)
    assert len(_tags(events, "histograms")) == 2 and len(_tags(events, "scalars")) == scalars
    assert not _tags(events, "images")


def test_a_run_is_the_same_with_it_as_without(small_learner, small_task, small_trainer):
    mixer = partial(FixedPointMixer, train_iterations=RandomCap())

    def run(callbacks):
        learner = small_learner(mixer=mixer, layers=2)
        trainer = small_trainer(callbacks=[*callbacks, SolverReport()], max_steps=8, **VALIDATING)
        trainer.fit(learner, small_task())
        return learner.state_dict(), dict(trainer.callback_metrics), torch.get_rng_state()

    weights, metrics, random = run([])
    weights_with, metrics_with, random_with = run([SolverProfile()])
    more = {f"validation/solver/layer_{i}/{name}" for i in (0, 1) for name in ("contraction", "contraction_bound")}
    assert metrics_with.keys() - metrics.keys() == more
    assert "validation/solver/layer_1/residual" in metrics
    for with_it, without in ((weights_with, weights), ({name: metrics_with[name] for name in metrics}, metrics)):
        torch.testing.assert_close(with_it, without, rtol=0, atol=0)
    assert torch.equal(random_with, random)


def test_of_two_ranks_one_draws_and_both_agree(small_learner, small_task, small_trainer, tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="run_0")
    callbacks = [SolverProfile(), RunTable(), ModelPage("")]
    options = {"strategy": "ddp_spawn", "devices": 2, "max_steps": 2, "limit_val_batches": 1.0, "val_check_interval": 2}
    trainer = small_trainer(callbacks=callbacks, logger=logger, **options)
    trainer.fit(small_learner(mixer=FixedPointMixer), small_task(validation_sequences=32))
    (file,) = (tmp_path / "run_0").glob("events*")
    events = EventAccumulator(str(file), {"images": 0}).Reload()
    assert [len(events.Images(tag)) for tag in _tags(events, "images")] == [1, 1]
    assert len(events.Scalars("validation/solver/layer_0/contraction")) == 1
    assert "_hparams_/session_start_info" in events.summary_metadata


@pytest.mark.parametrize("times", [5, 1e20])  # of which the latter overflows
def test_an_iteration_that_diverges_is_drawn_too(shown, times):
    def mixer(width):
        expansive = partial(Expansive, times=times)
        return FixedPointMixer(width, channel_mixer=expansive, train_iterations=2, evaluation_iterations=20)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*")
        events = shown(mixer)
    assert len(_tags(events, "images")) == 4
    assert not events.Scalars("validation/solver/layer_0/contraction")[0].value <= 1


@pytest.mark.parametrize(
    ("shape", "tolerance", "value"),
    [((1, 1, 1), 1e-2, 0.5), ((3, 2, 5), 0.0, 0.0), ((3, 2, 5), 3.0, torch.inf), ((3, 1, 1), 1e-2, torch.nan)],
    ids=str,
)
def test_figures_of_edge_cases_are_drawn(tolerance, shape, value):
    profile = Profile(
        decays=torch.full((4,), value),
        contraction=torch.full(shape[1:], value),
        contraction_bound=torch.full(shape[1:], value),
        iteration=Iteration(torch.full(shape, value), tolerance, training_iterations=2.0),
    )
    for figure in (draw_iterations(profile.iteration, "title"), draw_positions(profile, "title")):
        figure.savefig(io.BytesIO(), format="png")


def test_the_line_of_positions_is_where_they_settle():
    """Position p settles in iteration p + 1: the line steps up by one with each."""
    positions = iterations = torch.arange(6)
    residuals = (iterations[:, None] <= positions).float().clamp_min(1e-4)[:, None, :]
    profile = Profile(torch.ones(1), torch.ones(1, 6), torch.ones(1, 6), Iteration(residuals, 1e-2, 16))
    axes = draw_positions(profile, "title").axes[0]
    (line,) = axes.patches
    assert line.get_data().values.tolist() == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]
