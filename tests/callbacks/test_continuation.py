"""Random states go through a checkpoint."""

import random

import numpy as np
import torch

from fprnn_lightning.callbacks.continuation import random_states, set_random_states


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_random_states_survive_a_safe_file(tmp_path):
    draws()
    torch.save(random_states(), tmp_path / "states.pt")
    expected = draws()
    draws()
    set_random_states(torch.load(tmp_path / "states.pt", weights_only=True))
    assert draws() == expected
