"""What tests of all backends share."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Where Triton kernels run: on a GPU, or in Triton's interpreter on tensors of the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def threads():
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def nan_memory():
    """Fresh memory is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
