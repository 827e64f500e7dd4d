"""Every core against its recurrence written as a loop, one token at a time against in parallel, and its stability."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fprnn_lightning.channel_mixers.householder import Householder, Reflections
from fprnn_lightning.cores import Core, selective_ssm
from fprnn_lightning.cores.gated_diagonal import GatedDiagonal
from fprnn_lightning.cores.selective_ssm import SelectiveSSM
from fprnn_lightning.cores.state_space_dual import StateSpaceDual
from fprnn_lightning.mixers.diagonal import DiagonalMixer

CORES = [
    GatedDiagonal,
    lambda channels: SelectiveSSM(channels, states=3, dt_rank=2),
    lambda channels: SelectiveSSM(channels, states=5, unit_gates=False),
    lambda channels: StateSpaceDual(channels, states=3, head_channels=channels // 3),
    lambda channels: StateSpaceDual(channels, states=5, head_channels=1, unit_gates=False),
]


def _gates(core: Core, *shape: int):
    raw_decay, raw_input, raw_output = (
        torch.randn(*shape, size, dtype=torch.double, requires_grad=True)
        for size in (core.decay_channels, core.input_channels, core.output_channels)
    )
    x = torch.randn(*shape, core.channels, dtype=torch.double, requires_grad=True)
    return core.gates(raw_decay, raw_input, None if core.carries_output else raw_output, x)


def test_every_core_is_tested():
    assert {type(factory(6)) for factory in CORES} == set(Core.__subclasses__())


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("mixes", [True, False])
def test_tokens_one_at_a_time_are_the_pass_over_the_sequence(core, mixes):
    torch.manual_seed(0)
    core = core(9).double()
    gates = _gates(core, 2, 7)
    residual = torch.randn(2, 7, 9, dtype=torch.double) if mixes else None
    y, last = core.sequence_pass(gates, residual)
    carry, outputs = core.initial_carry(gates.value[:, 0]), []
    for t in range(7):
        now, r = type(gates)(*(gate[:, t] for gate in gates)), residual[:, t] if mixes else None
        offset, gain = core.token_pass(now, carry)
        outputs.append(offset + gain * r if mixes else offset)
        carry = core.next_carry(now, carry, r)
    torch.testing.assert_close(torch.stack(outputs, 1), y)
    torch.testing.assert_close(carry, last)


@pytest.mark.parametrize("convolution", [0, 3])
@pytest.mark.parametrize("unit_gates", [True, False])
def test_the_diagonal_mixer_of_the_selective_core_is_mamba(convolution, unit_gates):
    """The block of Mamba (arXiv 2312.00752, figure 3, algorithm 2) as a loop over time, and its gradients."""
    torch.manual_seed(0)
    mixer = DiagonalMixer(
        4, core=lambda channels: SelectiveSSM(channels, 3, 2, unit_gates), convolution=convolution, normalise=False
    ).double()
    u = torch.randn(2, 6, 4, dtype=torch.double)
    core = mixer.core
    x, z = (u @ mixer.input_projection.weight.T).chunk(2, -1)
    if convolution:
        filters = mixer.convolution.filters
        padded = functional.pad(x, (0, 0, convolution - 1, 0))
        x = functional.silu(sum(padded[:, k : k + 6] * filters.weight[:, 0, k] for k in range(3)) + filters.bias)
    raw_dt, b, c = (x @ mixer.terms.from_input.weight.T + mixer.terms.from_input.bias).split((2, 3, 3), -1)
    if unit_gates:
        b, c = b / b.norm(dim=-1, keepdim=True), c / c.norm(dim=-1, keepdim=True)
    dt = torch.log1p((raw_dt @ core.dt_weight.T + core.dt_bias).exp())
    h, ys = torch.zeros(2, 8, 3, dtype=torch.double), []
    for t in range(6):
        h = (-dt[:, t, :, None] * core.A_log.exp()).exp() * h + (dt * x)[:, t, :, None] * b[:, t, None]
        ys.append((h * c[:, t, None]).sum(-1) + core.D * x[:, t])
    expected = (torch.stack(ys, 1) * z * z.sigmoid()) @ mixer.output_projection.weight.T
    actual = mixer(u)
    torch.testing.assert_close(actual, expected)
    weights = list(mixer.parameters())
    torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), weights) for out in (actual, expected)))


def test_the_diagonal_mixer_of_the_dual_core_is_the_recurrence_of_mamba_2():
    """Mamba-2 (arXiv 2405.21060, section 7): heads with a scalar decay, B and C shared by them."""
    torch.manual_seed(0)
    mixer = DiagonalMixer(4, core=lambda channels: StateSpaceDual(channels, 3, 4, False), normalise=False).double()
    u = torch.randn(2, 6, 4, dtype=torch.double)
    core = mixer.core
    x, z = (u @ mixer.input_projection.weight.T).chunk(2, -1)
    raw_dt, b, c = (x @ mixer.terms.from_input.weight.T + mixer.terms.from_input.bias).split((2, 3, 3), -1)
    dt, rate = torch.log1p((raw_dt + core.dt_bias).exp()), -core.A_log.exp()
    outputs = []
    for head in range(2):
        x_head, dt_head = x[..., 4 * head : 4 * head + 4], dt[..., head, None]
        h, ys = torch.zeros(2, 4, 3, dtype=torch.double), []
        for t in range(6):
            driven = (dt_head * x_head)[:, t, :, None] * b[:, t, None]
            h = (dt_head[:, t, :, None] * rate[head]).exp() * h + driven
            ys.append((h * c[:, t, None]).sum(-1) + core.D[head] * x_head[:, t])
        outputs.append(torch.stack(ys, 1))
    expected = (torch.cat(outputs, -1) * z * z.sigmoid()) @ mixer.output_projection.weight.T
    actual = mixer(u)
    torch.testing.assert_close(actual, expected)
    weights = list(mixer.parameters())
    torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), weights) for out in (actual, expected)))


def test_the_selective_cores_begin_as_published():
    torch.manual_seed(0)
    for core in (SelectiveSSM(64), StateSpaceDual(64 * 64)):
        dt = functional.softplus(core.dt_bias)
        assert 1e-3 <= dt.min() < 2e-3 and 5e-2 < dt.max() <= 0.1 + 1e-6
        assert (core.D == 1).all()
    torch.testing.assert_close(SelectiveSSM(3, states=4).A_log.exp(), torch.arange(1.0, 5).expand(3, 4))
    assert (StateSpaceDual(64 * 64).A_log.exp() - 8.5).abs().max() <= 7.5
    assert SelectiveSSM(64).dt_weight.abs().max() <= 2**-0.5
    assert SelectiveSSM(64).decay_channels == 2 and SelectiveSSM(20).decay_channels == 1


@given(dt=st.floats(-3, 5), states=st.integers(1, 4), seed=st.integers(0, 999), dual=st.booleans())
@settings(max_examples=40, deadline=None)
def test_no_channel_mixer_that_shortens_makes_a_selective_core_grow(dt, states, seed, dual):
    """The solved loop without input, one lambda for all channels: the carry's norm never grows if ||I - Q|| <= 1."""
    torch.manual_seed(seed)
    core = (StateSpaceDual(6, states, 6) if dual else SelectiveSSM(6, states)).double()
    mixer = Householder(6)
    q = mixer.coefficients(torch.cat([torch.randn(1, 6), torch.full((1, 1), 7.0)], -1).double())  # alpha = 0.999
    with torch.no_grad():
        core.dt_bias.fill_(dt)
        carry = torch.randn_like(core.initial_carry(torch.zeros(1, 6, dtype=torch.double)))
        for _ in range(5):
            raw = (torch.randn(1, size, dtype=torch.double) for size in (core.input_channels, core.output_channels))
            zeros = torch.zeros(1, core.decay_channels, dtype=torch.double)
            gates = core.gates(zeros, *raw, torch.zeros(1, 6, dtype=torch.double))
            offset, gain = core.token_pass(gates, carry)
            assert (gain.abs() <= 1).all()
            y = mixer.solve(q, gain, offset)
            new = core.next_carry(gates, carry, mixer.residual_apply(q, y))
            assert new.norm() <= carry.norm() * (1 + 1e-9)
            carry = new


@pytest.mark.parametrize("core", [GatedDiagonal(2), SelectiveSSM(2, states=1)])
def test_steps_of_several_lambdas_that_shrink_alone_may_grow_together(core):
    """Either token keeps one channel and sets the other to three times it, where Q removes the direction."""
    mixer, zeros = Householder(2), torch.zeros(1, 2, dtype=torch.double)
    carry, one = zeros + 1, torch.ones(1, 1, dtype=torch.double)
    for direction in 3 * ([1.0, -3.0], [-3.0, 1.0]):
        u = functional.normalize(torch.tensor([[direction]], dtype=torch.double), dim=-1)
        q = Reflections(u, 0.999999 * one)
        decay = u[:, 0].abs().lt(0.5).double().clamp(1e-6, 1 - 1e-6)  # of the longer component 0, of the other 1
        gates = selective_ssm.Gates(zeros, -decay.log(), one, one)
        if core.carries_output:
            gates = core.gates(decay.logit(), zeros, None, zeros)
        offset, gain = core.token_pass(gates, carry if core.carries_output else carry[..., None])
        carry = mixer.solve(q, gain, offset)
    assert mixer.residual_bound(q) < 1 and carry.norm() > 700


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        (lambda: SelectiveSSM(4, states=0), "states is 0 and dt_rank 1, both must be at least 1"),
        (lambda: SelectiveSSM(4, dt_rank=0), "states is 16 and dt_rank 0, both must be at least 1"),
        (lambda: StateSpaceDual(4, states=0, head_channels=2), "states is 0, must be at least 1"),
        (lambda: StateSpaceDual(96), "head_channels is 64, must divide the 96 channels"),
    ],
)
def test_impossible_sizes_are_refused(factory, sentence):
    with pytest.raises(ValueError, match=sentence):
        factory()


@pytest.mark.parametrize("core", [SelectiveSSM(5, states=2), StateSpaceDual(5, states=2, head_channels=1)])
@pytest.mark.parametrize("rate", [1e-3, 1.0, 16.0, 1e3])
def test_step_sizes_far_out_have_finite_weights_and_gradients(core, rate):
    core.zero_grad()
    with torch.no_grad():
        core.A_log.fill_(math.log(rate))
        core.dt_bias.copy_(torch.tensor([-200.0, -100.0, -86.5, 0.0, 200.0]))
    raw = [torch.zeros(1, 4, size) for size in (core.decay_channels, 2, 2)]
    y, _ = core.sequence_pass(core.gates(raw[0], raw[1] + 1, raw[2] + 1, torch.ones(1, 4, 5)), torch.ones(1, 4, 5))
    y.sum().backward()
    assert y.isfinite().all() and core.dt_bias.grad.isfinite().all() and core.A_log.grad.isfinite().all()
