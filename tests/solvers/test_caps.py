"""Caps that are not one number: as many iterations as tokens, or a draw that a seed and a count decide."""

import numpy as np
import pytest
import torch
from torch import nn

from fprnn_lightning.solvers.caps import Draws, RandomCap, SequenceLength


def test_the_length_of_the_sequence_is_the_cap_from_a_least_number_on():
    assert [SequenceLength(4).iterations(time, 0) for time in (1, 4, 5, 300)] == [4, 4, 5, 300]


def test_draws_have_the_published_distribution():
    """Gamma(4) of mean 4: a standard deviation of 2, and P(x < 1.5) = 0.066, which makes 1."""
    drawn = np.array([RandomCap().iterations(16, draw) for draw in range(4000)])
    assert drawn.min() == 1 and drawn.dtype.kind == "i"
    assert drawn.mean() == pytest.approx(4, abs=0.15) and drawn.std() == pytest.approx(2, abs=0.15)
    assert (drawn == 1).mean() == pytest.approx(0.066, abs=0.015)
    wide = np.array([RandomCap(10, 1).iterations(16, draw) for draw in range(4000)])
    assert wide.mean() == pytest.approx(10, abs=0.6) and wide.std() == pytest.approx(10, abs=1)


def test_a_draw_is_a_function_of_seed_and_number():
    first, again, other = (
        [RandomCap(20, seed=seed).iterations(time, draw) for draw in range(50)]
        for seed, time in ((1, 5), (1, 9), (2, 5))
    )
    assert first == again != other and len(set(first)) > 5
    assert first[:5] == [RandomCap(20, seed=1).iterations(5, draw) for draw in range(5)]


def test_the_count_of_draws_travels_by_state_dict_and_stays_on_the_host():
    draws = nn.ModuleDict({"draws": Draws()})
    assert [draws["draws"].next() for _ in range(3)] == [0, 1, 2]
    (state,) = draws.state_dict().values()
    assert isinstance(state, torch.Tensor) and state.shape == ()
    resumed = nn.ModuleDict({"draws": Draws()})
    resumed.load_state_dict(draws.state_dict())
    assert resumed["draws"].next() == draws["draws"].next() == 3


def test_a_draw_can_be_had_again():
    draws = Draws()
    assert (draws.next(), draws.next()) == (0, 1)
    draws.again()
    assert (draws.next(), draws.next()) == (1, 2)


@pytest.mark.parametrize(
    "make", [lambda: SequenceLength(0), lambda: RandomCap(0), lambda: RandomCap(4, -1), lambda: RandomCap(seed=-1)]
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="must"):
        make()
