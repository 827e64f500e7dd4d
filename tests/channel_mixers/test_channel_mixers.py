"""Every channel mixer against its own dense matrix, and the bounds that the contraction rests on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fprnn_lightning.channel_mixers import ChannelMixer
from fprnn_lightning.channel_mixers.householder import Householder

FACTORIES = [lambda channels, r=rank: Householder(channels, r) for rank in (1, 2, 3)]


def _raw(mixer: ChannelMixer, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, mixer.raw_channels, dtype=torch.double)


def test_every_channel_mixer_is_tested():
    tested = {type(factory(4)) for factory in FACTORIES}
    assert tested == set(ChannelMixer.__subclasses__())


@pytest.mark.parametrize("factory", FACTORIES)
@given(channels=st.integers(3, 9), scale=st.sampled_from([0.1, 1.0, 10.0]), seed=st.integers(0, 2**16))
@settings(max_examples=20, deadline=None)
def test_apply_residual_and_solve_are_those_of_the_dense_matrix(factory, channels, scale, seed):
    torch.manual_seed(seed)
    mixer = factory(channels)
    raw, v = _raw(mixer, 2, 5, scale=scale), torch.randn(2, 5, channels, dtype=torch.double)
    gain = torch.rand(2, 5, channels, dtype=torch.double)
    q, matrix, identity = mixer.coefficients(raw), mixer.dense_matrix(raw), torch.eye(channels, dtype=torch.double)
    torch.testing.assert_close(mixer.apply(q, v), (matrix @ v[..., None])[..., 0])
    torch.testing.assert_close(mixer.residual_apply(q, v), ((identity - matrix) @ v[..., None])[..., 0])
    system = identity - gain[..., None] * (identity - matrix)
    torch.testing.assert_close(system @ mixer.solve(q, gain, v)[..., None], v[..., None], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("factory", FACTORIES)
def test_gradients_of_apply_and_solve(factory):
    torch.manual_seed(0)
    mixer = factory(4)
    raw, v = _raw(mixer, 2).requires_grad_(), torch.randn(2, 4, dtype=torch.double, requires_grad=True)
    gain = torch.rand(2, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda raw, v: mixer.apply(mixer.coefficients(raw), v), (raw, v))
    assert torch.autograd.gradcheck(lambda raw, g, v: mixer.solve(mixer.coefficients(raw), g, v), (raw, gain, v))


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_householder_never_stretches_and_one_reflection_contracts(scale):
    torch.manual_seed(0)
    for rank in (1, 2, 3):
        mixer = Householder(6, rank)
        raw = _raw(mixer, 100, scale=scale)
        matrix = mixer.dense_matrix(raw)
        assert torch.linalg.matrix_norm(matrix, 2).max() <= 1 + 1e-12
        if rank == 1:
            strengths = raw[..., -1].sigmoid()
            residual = torch.linalg.matrix_norm(torch.eye(6, dtype=torch.double) - matrix, 2)
            torch.testing.assert_close(residual, strengths)


def test_householder_is_the_product_in_the_documented_order():
    torch.manual_seed(0)
    mixer = Householder(5, 3)
    raw = _raw(mixer)
    directions = torch.nn.functional.silu(raw[:15]).reshape(3, 5)
    product = torch.eye(5, dtype=torch.double)
    for u, alpha in zip(directions, raw[15:].sigmoid(), strict=True):
        product = product @ (torch.eye(5, dtype=torch.double) - alpha * torch.outer(u, u) / (u @ u))
    torch.testing.assert_close(mixer.dense_matrix(raw), product)


@pytest.mark.parametrize("rank", [0, 5])
def test_a_rank_out_of_range_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank is {rank}, must be between 1 and the 4 channels"):
        Householder(4, rank)
