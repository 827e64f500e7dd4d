"""Operations by formula against those that torch counts: matrix products agree exactly, the rest is spelt out."""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fprnn_lightning.channel_mixers.dense import Dense
from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.channel_mixers.kronecker import Kronecker
from fprnn_lightning.channel_mixers.low_rank import LowRank
from fprnn_lightning.channel_mixers.monarch import Monarch
from fprnn_lightning.channel_mixers.orthogonal import Orthogonal
from fprnn_lightning.cores.selective_ssm import SelectiveSSM
from fprnn_lightning.cores.state_space_dual import StateSpaceDual
from fprnn_lightning.mixers import SequenceMixer
from fprnn_lightning.mixers.base import Cost
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.diagonal import DiagonalMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.lstm import LSTMMixer
from fprnn_lightning.mixers.recurrent import StateDependence
from fprnn_lightning.model import SequenceModel
from fprnn_lightning.solvers import Stopping
from fprnn_lightning.solvers.caps import RandomCap, SequenceLength
from fprnn_lightning.solvers.gradients import Unrolled

WIDTH, D, ITERATIONS = 8, 16, 3
LOOP = {"gradient": Unrolled(), "stopping": Stopping(0.0, 1.0), "train_iterations": ITERATIONS}
fixed = partial(FixedPointMixer, **LOOP)
mamba, mamba_2 = partial(SelectiveSSM, states=4), partial(StateSpaceDual, states=4, head_channels=8)
PASS, MAMBA, MAMBA_2 = 5 * D, (7 * 4 + 3) * D, (5 * 4 + 3) * D
CASES = {  # what torch does not count, per token: elementwise recurrences and reflections, factorisations
    "LSTM": (LSTMMixer, 0),
    "diagonal": (DiagonalMixer, PASS),
    "Mamba": (partial(DiagonalMixer, core=mamba, convolution=4), MAMBA),
    "Mamba-2": (partial(DiagonalMixer, core=mamba_2, convolution=4), MAMBA_2),
    "dense": (partial(DenseMixer, fused=False), PASS),
    "dense Dense": (partial(DenseMixer, channel_mixer=Dense), PASS + 2 * D**3 + 2 * D**3 // 3 + 2 * D**2),
    "FP-RNN": (fixed, ITERATIONS * (PASS + 4 * D)),
    "FP-RNN, 3 reflections": (partial(fixed, channel_mixer=partial(Householder, rank=3)), ITERATIONS * (PASS + 12 * D)),
    "FP-RNN DPLR": (partial(fixed, channel_mixer=partial(LowRank, rank=2)), ITERATIONS * (PASS + 8 * D)),
    "FP-RNN Kronecker": (partial(fixed, channel_mixer=Kronecker), ITERATIONS * PASS),
    "FP-RNN Monarch": (partial(fixed, channel_mixer=Monarch), ITERATIONS * (PASS + 8 * D)),
    "FP-RNN Orthogonal": (partial(fixed, channel_mixer=Orthogonal), ITERATIONS * PASS),
    "FP-RNN Dense": (partial(fixed, channel_mixer=Dense), ITERATIONS * (PASS + 2 * D**3)),
    "FP-RNN, Q of the input": (
        partial(fixed, channel_mixer=Kronecker, dependence=StateDependence(channel_mixer=False)),
        ITERATIONS * PASS,
    ),
    "FP-Mamba": (partial(fixed, core=mamba, convolution=4), ITERATIONS * (MAMBA + 4 * D)),
    "FP-Mamba-2": (partial(fixed, core=mamba_2), ITERATIONS * (MAMBA_2 + 4 * D)),
}


def _counted_per_token(model: torch.nn.Module, inputs: torch.Tensor) -> float:
    """What a longer sequence costs more than a shorter one, so that what is done once for all tokens is left out."""
    totals = []
    for time in (5, 9):
        with FlopCounterMode(display=False) as counter:
            model(inputs[:, :time])
        totals.append(counter.get_total_flops())
    return (totals[1] - totals[0]) / (len(inputs) * 4)


@pytest.mark.parametrize("name", CASES)
def test_the_formula_is_what_torch_counts_and_what_it_does_not(name):
    factory, uncounted = CASES[name]
    mixer: SequenceMixer = factory(WIDTH)
    inputs = torch.randn(2, 9, WIDTH)
    if type(mixer) is LSTMMixer:  # whose float32 kernel torch cannot look into
        mixer, inputs = mixer.double(), inputs.double()
    assert mixer.cost(time=9).most - uncounted == _counted_per_token(mixer, inputs)


def test_what_torch_does_not_count_is_little_in_a_model_of_usual_size():
    for factory in (fixed, partial(DenseMixer, fused=False), DiagonalMixer):
        mixer = factory(128)
        most = mixer.cost(time=9).most
        assert 0.95 * most < _counted_per_token(mixer, torch.randn(2, 9, 128)) < most


@pytest.mark.parametrize(("cap", "typical"), [(7, 7), (SequenceLength(least=5), 12), (RandomCap(mean=3.5), 3.5)])
def test_iterations_are_the_most_in_training_or_their_mean(cap, typical):
    assert FixedPointMixer(WIDTH, train_iterations=cap).cost(time=12).iterations == typical


def test_all_iterations_are_counted():
    assert Cost(once=5, per_iteration=7, iterations=3).most == 26


def test_the_parts_of_a_model_are_all_of_it():
    model = SequenceModel(5, fixed, width=WIDTH, layers=2, mlp_ratio=2.0)
    parts = model.parts(time=9)
    assert [part.name for part in parts] == [
        "embedding",
        *(f"layer {layer}, {what}" for layer in (0, 1) for what in ("fixed_point", "MLP")),
        "head",
    ]
    assert sum(part.parameters for part in parts) == sum(parameter.numel() for parameter in model.parameters())
    uncounted = 2 * CASES["FP-RNN"][1]
    counted = _counted_per_token(model, torch.randint(5, (2, 9)))
    assert sum(part.cost.most for part in parts) - uncounted == counted
    assert sum(part.state_bytes for part in parts) == 2 * 3 * D * 4
