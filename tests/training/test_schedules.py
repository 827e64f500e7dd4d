"""Learning-rate factors at the joints, and their bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fprnn_lightning.training.schedules import WarmupConstant, WarmupCosine, WarmupHoldCosine

steps = st.integers(0, 5000)


def test_warmup_constant():
    schedule = WarmupConstant(warmup_steps=4)
    assert [schedule.factor(step, None) for step in (0, 1, 3, 4, 1000)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert not schedule.finished(10**6, 10**6)
    assert WarmupConstant(0).factor(0, None) == 1.0


def test_warmup_cosine():
    schedule = WarmupCosine(warmup_steps=4, total_steps=12)
    assert [schedule.factor(step, None) for step in (0, 3, 4, 8, 12, 13)] == pytest.approx([0.25, 1, 1, 0.5, 0, 0])
    assert [schedule.finished(step, None) for step in (11, 12)] == [False, True]


def test_hold_waits_for_the_curriculum():
    schedule = WarmupHoldCosine(warmup_steps=4, decay_steps=8)
    assert [schedule.factor(step, None) for step in (0, 3, 10**6)] == [0.25, 1.0, 1.0]
    assert [schedule.factor(100 + late, late) for late in (0, 4, 8)] == pytest.approx([1.0, 0.5, 0.0])
    assert [schedule.finished(1000, late) for late in (None, 7, 8)] == [False, False, True]


@given(st.integers(0, 50), st.integers(1, 200), steps, st.none() | steps)
def test_factors_stay_between_0_and_1_and_end_with_training(warmup, decay, step, steps_at_end):
    for schedule in (WarmupConstant(warmup), WarmupCosine(warmup, warmup + decay), WarmupHoldCosine(warmup, decay)):
        factor = schedule.factor(step, steps_at_end)
        assert 0 <= factor <= 1
        assert (factor < 1e-12) == schedule.finished(step, steps_at_end)


@given(st.integers(0, 50), st.integers(1, 200), steps)
def test_factors_do_not_rise_after_warmup(warmup, decay, step):
    for schedule in (WarmupCosine(warmup, warmup + decay), WarmupHoldCosine(warmup, decay)):
        assert schedule.factor(warmup + step + 1, step + 1) <= schedule.factor(warmup + step, step)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WarmupConstant(-1), "WarmupConstant: warmup_steps is -1, must be at least 0"),
        (lambda: WarmupCosine(10, 10), "WarmupCosine: total_steps is 10, must be at least 11"),
        (lambda: WarmupHoldCosine(10, 0), "WarmupHoldCosine: decay_steps is 0, must be at least 1"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
