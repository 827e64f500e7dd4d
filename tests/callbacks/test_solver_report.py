"""What the solver report says of real solves, of states and of gradients: in numbers always, in words once."""

import warnings

import pytest
import torch

from fprnn_lightning.callbacks import SolverReport
from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.solvers.gradients import Implicit, OneStep


class Expansive(Householder):
    """I - Q five times too large."""

    def residual_apply(self, q, v):
        return 5 * super().residual_apply(q, v)


def _told(run) -> list[str]:
    """What a run warns of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in told if "converged" in str(each.message)]


def test_a_gradient_that_has_not_converged_is_logged_always_and_told_once(small_learner, small_task, small_trainer):
    def mixer(width):
        return FixedPointMixer(width, gradient=Implicit(iterations=1, tolerance=1e-9))

    trainer = small_trainer(callbacks=[SolverReport()])
    (sentence,) = _told(lambda: trainer.fit(small_learner(mixer=mixer, layers=2), small_task()))
    for part in (
        "layer 0: the gradients of 16 of 16 sequences have not converged after 1 iterations in step 1",
        "said once, solver/layer_0/adjoint_converged tells",
    ):
        assert part in sentence
    for layer in (0, 1):
        prefix = f"solver/layer_{layer}/adjoint_"
        logged = {name: trainer.callback_metrics[prefix + name] for name in ("iterations", "residual", "converged")}
        assert (logged["iterations"], logged["converged"]) == (1, 0) and logged["residual"] > 1e-9


@pytest.mark.parametrize("gradient", [Implicit(64, 1e-2), OneStep()], ids=str)
def test_nothing_is_told_of_gradients_that_have_converged_or_are_not_solved_for(
    small_learner, small_task, small_trainer, gradient
):
    trainer = small_trainer(callbacks=[SolverReport()])
    learner = small_learner(mixer=lambda width: FixedPointMixer(width, gradient=gradient))
    assert _told(lambda: trainer.fit(learner, small_task())) == []
    assert ("solver/layer_0/adjoint_converged" in trainer.callback_metrics) == isinstance(gradient, Implicit)


def test_an_expansive_mixer_is_told_of_once(small_learner, small_task, small_trainer):
    """A fit on few steps, then a test set of several batches."""
    learner = small_learner(
        mixer=lambda width: FixedPointMixer(
            width, channel_mixer=Expansive, train_iterations=3, evaluation_iterations=20, gradient=OneStep()
        )
    )
    trainer = small_trainer(callbacks=[SolverReport()], max_steps=2)
    assert _told(lambda: trainer.fit(learner, small_task())) == []
    assert trainer.callback_metrics["solver/layer_0/converged"] == 0
    (sentence,) = _told(lambda: trainer.test(learner, small_task(test_sequences=48), verbose=False))
    assert "layer 0: 48 of 48 test sequences have not converged after 20 iterations" in sentence
    assert trainer.callback_metrics["test/solver/layer_0/converged"] == 0
    assert torch.isfinite(trainer.callback_metrics["test/solver/layer_0/residual"])
