"""Changes and inner products of items are those of their parts of y, cut out one by one."""

import pytest
import torch

from fprnn_lightning.solvers.items import PREFIXES, SEQUENCES


@pytest.fixture
def pair():
    torch.manual_seed(0)
    return torch.randn(2, 3, 5, 4).double()


def _relative(y, f_y):
    return (f_y - y).abs().max() / f_y.abs().max()


def test_sequences(pair):
    y, f_y = pair
    for b in range(3):
        assert SEQUENCES.change(y, f_y)[b] == _relative(y[b], f_y[b])
        torch.testing.assert_close(SEQUENCES.product(y, f_y)[b], (y[b] * f_y[b]).sum())


def test_prefixes(pair):
    y, f_y = pair
    for b in range(3):
        for t in range(5):
            worst = max(_relative(y[b, s], f_y[b, s]) for s in range(t + 1))
            assert PREFIXES.change(y, f_y)[b, t] == worst
            torch.testing.assert_close(PREFIXES.product(y, f_y)[b, t], (y[b] * f_y[b])[: t + 1].sum())


@pytest.mark.parametrize("items", [SEQUENCES, PREFIXES], ids=["sequences", "prefixes"])
def test_what_is_0_and_stays_0_has_not_changed(items):
    zeros = torch.zeros(3, 5, 4)
    assert (items.change(zeros, zeros) == 0).all() and items.change(zeros, zeros).shape == zeros.shape[: items.axes]
    assert (items.product(zeros, zeros) == 0).all() and items.product(zeros, zeros).shape == zeros.shape[: items.axes]
