"""Eigenvalues by repeated squaring against LAPACK's, where gaps are wide, tiny or none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fprnn_lightning.channel_mixers.spectrum import largest_eigenvalue, spectral_norm

SPECTRA = {
    "gap": [1.0, 0.5, 0.1, 0.0],
    "small gap": [1.0, 1 - 1e-3, 1 - 2e-3, 0.9],
    "tiny gap": [1.0, 1 - 1e-7, 1 - 1e-9, 0.3],
    "repeated": [1.0, 1.0, 1.0, 0.2],
    "identity": [1.0] * 4,
    "zero": [0.0] * 4,
}


def _with_spectrum(spectrum: list[float], scale: float) -> torch.Tensor:
    rotation, _ = torch.linalg.qr(torch.randn(50, len(spectrum), len(spectrum), dtype=torch.double))
    return scale * (rotation * torch.tensor(spectrum, dtype=torch.double)) @ rotation.mT


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("name", SPECTRA)
def test_value_is_exact_to_rounding_whatever_the_gaps(name, scale):
    torch.manual_seed(0)
    matrix = _with_spectrum(SPECTRA[name], scale)
    expected = torch.full((50,), scale * SPECTRA[name][0], dtype=torch.double)
    torch.testing.assert_close(largest_eigenvalue(matrix), expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(largest_eigenvalue(matrix.float()), expected.float(), rtol=2e-6, atol=0)


@given(size=st.integers(1, 40), rank=st.integers(1, 40), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_random_matrices(size, rank, scale, seed):
    torch.manual_seed(seed)
    root = scale * torch.randn(3, size, rank, dtype=torch.double)
    torch.testing.assert_close(largest_eigenvalue(root @ root.mT), torch.linalg.eigvalsh(root @ root.mT)[..., -1])
    square = torch.randn(3, size, size, dtype=torch.double)
    torch.testing.assert_close(spectral_norm(square), torch.linalg.matrix_norm(square, 2))


def test_gradient_where_the_eigenvalue_is_simple():
    torch.manual_seed(0)
    root = torch.randn(2, 5, 5, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda root: largest_eigenvalue(root @ root.mT), root)


def test_gradient_where_it_is_repeated_is_a_finite_subgradient():
    """lambda_max(P + E) >= lambda_max(P) + <gradient, E>, as it is convex."""
    torch.manual_seed(0)
    matrix = _with_spectrum(SPECTRA["repeated"], 1.0).requires_grad_()
    largest_eigenvalue(matrix).sum().backward()
    torch.testing.assert_close(matrix.grad.diagonal(dim1=-2, dim2=-1).sum(-1), torch.ones(50, dtype=torch.double))
    change = torch.randn(50, 4, 4, dtype=torch.double)
    change = 0.1 * (change + change.mT)
    moved = torch.linalg.eigvalsh(matrix.detach() + change)[..., -1]
    assert (moved >= 1 + (matrix.grad * change).sum((-2, -1)) - 1e-12).all()


def test_what_is_not_finite_stays_so_and_harms_no_neighbour():
    matrix = torch.eye(3).repeat(3, 1, 1)
    matrix[1, 0, 0] = torch.nan
    value = largest_eigenvalue(matrix)
    assert value[1].isnan()
    torch.testing.assert_close(value[[0, 2]], torch.ones(2))
