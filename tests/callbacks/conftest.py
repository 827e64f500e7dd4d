"""A mixer with the diagnostics of one that iterates."""

import pytest
import torch

from fprnn_lightning.mixers.lstm import LSTMMixer


@pytest.fixture
def iterating_mixer():
    class IteratingMixer(LSTMMixer):
        asked = 0

        def diagnostics(self):
            IteratingMixer.asked += 1
            iterations, residual = torch.tensor([2, 4, 3, 3]), torch.tensor([0.0, 0.5, 0.25, 0.0])
            return {"iterations": iterations, "residual": residual, "converged": residual < 0.3}

    return IteratingMixer
