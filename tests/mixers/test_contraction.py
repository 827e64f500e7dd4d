"""The contraction factor against the spectral norm of the matrix itself, for every channel mixer."""

import pytest
import torch

from fprnn_lightning.channel_mixers import ChannelMixer
from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.mixers.contraction import contraction, contraction_bound


@pytest.mark.parametrize("factory", ChannelMixer.__subclasses__(), ids=lambda factory: factory.__name__)
def test_the_norm_is_between_the_estimate_and_the_bound(factory):
    torch.manual_seed(0)
    channel_mixer = factory(12).double()
    raw = torch.randn(3, 5, channel_mixer.raw_channels, dtype=torch.double)
    gain = torch.rand(3, 5, 12, dtype=torch.double)
    matrix = gain[..., None] * (torch.eye(12, dtype=torch.double) - channel_mixer.dense_matrix(raw))
    norm = torch.linalg.matrix_norm(matrix, 2)
    q = channel_mixer.coefficients(raw)
    with torch.no_grad():
        estimate, bound = (factor(channel_mixer, q, gain) for factor in (contraction, contraction_bound))
    assert (estimate <= norm * (1 + 1e-9)).all() and (norm <= bound * (1 + 1e-9)).all()
    assert (estimate >= 0.95 * norm).all()
    if factory is Householder:
        torch.testing.assert_close(estimate, norm)
