"""How the length of training goes over the steps."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fprnn_lightning.training.curriculum import FixedLength, ProgressiveLengths, UniformLengths


def feed(curriculum, accuracies, start=0):
    """The length after each observed accuracy."""
    lengths = []
    for step, accuracy in enumerate(accuracies, start):
        curriculum.observe(torch.tensor(accuracy), step)
        lengths.append(curriculum.length(step + 1))
    return lengths


def test_fixed_length():
    curriculum = FixedLength(7)
    assert feed(curriculum, [1.0] * 5) == [7] * 5
    assert (curriculum.end, curriculum.steps_at_end(3), curriculum.state_dict()) == (7, 3, {})


def test_uniform_lengths_are_a_function_of_the_step_and_take_every_value():
    lengths = [UniformLengths(2, 6).length(step) for step in range(5000)]
    assert lengths == [UniformLengths(2, 6).length(step) for step in range(5000)]
    assert set(lengths) == {2, 3, 4, 5, 6}
    assert all(800 < lengths.count(length) < 1200 for length in range(2, 7))


def test_progressive_lengths_need_the_threshold_at_every_length():
    curriculum = ProgressiveLengths(3, 5, threshold=0.8, smoothing=0.9)
    assert feed(curriculum, [0.79] * 200) == [3] * 200
    curriculum = ProgressiveLengths(3, 5, threshold=0.8, smoothing=0.9)
    assert feed(curriculum, [1.0] * 40) == [3] * 15 + [4] * 16 + [5] * 9  # 1 - 0.9^16 > 0.8
    assert [curriculum.steps_at_end(step) for step in (32, 40)] == [0, 8]


@given(st.lists(st.floats(0, 1, width=32), max_size=60), st.integers(1, 4), st.integers(0, 5), st.floats(0, 0.95))
def test_progressive_lengths_grow_by_one_at_most_and_stay_within(accuracies, start, more, smoothing):
    curriculum = ProgressiveLengths(start, start + more, threshold=0.5, smoothing=smoothing)
    lengths = [start, *feed(curriculum, accuracies)]
    assert all(longer - shorter in (0, 1) for shorter, longer in pairwise(lengths))
    assert lengths[-1] <= start + more
    reached = lengths.index(start + more) if start + more in lengths else None
    expected = None if reached is None else len(accuracies) - reached
    assert curriculum.steps_at_end(len(accuracies)) == expected


@given(st.lists(st.floats(0, 1, width=32), max_size=40), st.lists(st.floats(0, 1, width=32), max_size=40))
def test_progressive_lengths_go_on_from_a_saved_position(before, after):
    def make():
        return ProgressiveLengths(2, 6, threshold=0.4, smoothing=0.5)

    whole, first, second = make(), make(), make()
    lengths = feed(whole, before + after)
    feed(first, before)
    second.load_state_dict(first.state_dict())
    assert feed(second, after, start=len(before)) == lengths[len(before) :]
    assert second.state_dict() == whole.state_dict()


def test_a_saved_position_goes_on_in_another_curriculum():
    solved = ProgressiveLengths(3, 4, threshold=0.5, smoothing=0.0)
    feed(solved, [1.0, 1.0])
    longer = ProgressiveLengths(3, 9, threshold=0.5, smoothing=0.0)
    longer.load_state_dict(solved.state_dict())
    assert (longer.length(2), longer.steps_at_end(2)) == (4, None)
    shorter = ProgressiveLengths(2, 3, threshold=0.5, smoothing=0.0)
    shorter.load_state_dict(solved.state_dict())
    assert shorter.length(2) == 3
    shorter.load_state_dict(FixedLength(8).state_dict())
    assert shorter.length(2) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedLength(0), "FixedLength: length is 0, must be at least 1"),
        (lambda: UniformLengths(0, 4), "UniformLengths: start is 0 and end is 4, must be at least 1 and in this order"),
        (lambda: ProgressiveLengths(9, 4), "start is 9 and end is 4, must be at least 1 and in this order"),
        (lambda: ProgressiveLengths(threshold=1.0), "threshold is 1.0, must be between 0 and 1"),
        (lambda: ProgressiveLengths(smoothing=1.0), "smoothing is 1.0, must be at least 0 and below 1"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
