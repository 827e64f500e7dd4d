"""Early stopping at a validation accuracy."""

import pytest

from fprnn_lightning.callbacks import StopWhenSolved


@pytest.mark.parametrize(("threshold", "steps"), [(0.01, 2), (1.0, 6)])
def test_it_stops_at_the_first_validation_that_passes(small_learner, small_task, small_trainer, threshold, steps):
    trainer = small_trainer(
        callbacks=[StopWhenSolved(threshold)],
        max_steps=6,
        limit_val_batches=1.0,
        val_check_interval=2,
        num_sanity_val_steps=1,
    )
    trainer.fit(small_learner(), small_task())
    assert trainer.global_step == steps


@pytest.mark.parametrize("threshold", [0.0, 1.1])
def test_bad_thresholds_are_refused(threshold):
    with pytest.raises(ValueError, match="must be above 0 and at most 1"):
        StopWhenSolved(threshold)
