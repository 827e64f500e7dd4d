"""Random states go through a checkpoint."""

import random

import numpy as np
import pytest
import torch

from fprnn_lightning.callbacks.continuation import begin_step, random_states, set_random_states


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_random_states_survive_a_safe_file(tmp_path):
    draws()
    torch.save(random_states(), tmp_path / "states.pt")
    expected = draws()
    draws()
    set_random_states(torch.load(tmp_path / "states.pt", weights_only=True))
    assert draws() == expected


@pytest.mark.parametrize(
    ("processed", "completed", "before", "now", "expected"),
    [
        (6, 6, 1, 1, (6, 6)),
        (6, 5, 2, 2, (6, 5)),  # saved as the last batch of a step ended
        (7, 7, 2, 2, (6, 6)),  # saved within a step, which begins anew
        (7, 6, 2, 2, (6, 6)),
        (6, 5, 2, 4, (12, 11)),
        (12, 12, 4, 1, (3, 3)),
    ],
)
def test_a_fit_goes_on_at_the_beginning_of_a_step(processed, completed, before, now, expected):
    counts = {"ready": processed, "started": processed, "processed": processed, "completed": completed}
    progress = {"epoch_loop.batch_progress": {"total": dict(counts), "current": dict(counts)}}
    begin_step(progress, before, now)
    for part in progress["epoch_loop.batch_progress"].values():
        assert (part["processed"], part["completed"]) == expected
        assert part["ready"] == part["started"] == expected[0]
