"""The losses of 20 training steps per mixer, in float64, are those on record: a refactor changes none of them.

Where a change is meant to change them, `python tests/training/test_loss_traces.py` records them anew.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from fprnn_lightning.channel_mixers.kronecker import Kronecker
from fprnn_lightning.cores.selective_ssm import SelectiveSSM
from fprnn_lightning.cores.state_space_dual import StateSpaceDual
from fprnn_lightning.mixers.base import SequenceMixer
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.diagonal import DiagonalMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.lstm import LSTMMixer
from fprnn_lightning.model import SequenceModel
from fprnn_lightning.tasks.word_problem import WordProblem
from fprnn_lightning.training.sequence_learner import weight_decay_groups

RECORD = Path(__file__).with_name("loss_traces.json")
MIXERS = {
    **{mixer.__name__: mixer for mixer in (DenseMixer, DiagonalMixer, FixedPointMixer, LSTMMixer)},
    "Mamba": partial(DiagonalMixer, core=SelectiveSSM, convolution=4, normalise=False),
    "FP-Mamba": partial(FixedPointMixer, core=SelectiveSSM, convolution=4),
    "FP-Mamba-2-K": partial(
        FixedPointMixer, core=partial(StateSpaceDual, states=8, head_channels=8), channel_mixer=Kronecker
    ),
}


def loss_trace(mixer: Callable[[int], SequenceMixer]) -> list[float]:
    torch.manual_seed(0)
    task = WordProblem("S3", batch_size=16, train_length=6)
    model = SequenceModel(task.vocab_size, mixer, width=8).double()
    optimizer = torch.optim.AdamW(weight_decay_groups(model, 0.1), lr=1e-2)
    losses = []
    for step in range(20):
        tokens, targets = task.batch("train", step)
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MIXERS)
def test_the_losses_are_those_on_record(name):
    recorded = json.loads(RECORD.read_text())[name]
    assert loss_trace(MIXERS[name]) == pytest.approx(recorded, rel=1e-9)
    assert recorded[-1] < recorded[0]


if __name__ == "__main__":
    RECORD.write_text(json.dumps({name: loss_trace(mixer) for name, mixer in MIXERS.items()}, indent=1) + "\n")
