"""linear_scan: its definition, every backend against the float64 reference, and what a caller may rely on."""

import subprocess
import sys

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_as_accurate
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, Dataset

from fprnn_lightning.scan import (
    backends,
    linear_cpu_kernels,
    linear_reference,
    linear_scan,
    resolve_backend,
    thread_kernels,
)

BACKENDS = ("reference", "cpu")
NAMES = ("states", "grad_decay", "grad_drive", "grad_initial")


def inputs(B, T, *trailing, dtype=torch.float32, seed=0):
    """decay, drive, initial, grad; a share of the decays is 0, 1, -1 or next to ±1."""
    generator = torch.Generator().manual_seed(seed)
    decay = 2 * torch.rand(B, T, *trailing, generator=generator) - 1
    special = torch.tensor([0.0, 1.0, -1.0, 1 - 2**-12, 2**-12 - 1])
    choice = torch.randint(4 * len(special), decay.shape, generator=generator)
    decay = torch.where(choice < len(special), special[choice % len(special)], decay)
    drive, grad = torch.randn(2, B, T, *trailing, generator=generator)
    initial = torch.randn(B, *trailing, generator=generator)
    return [x.to(dtype) for x in (decay, drive, initial, grad)]


def run(decay, drive, initial, grad, **options):
    """States and the gradients to the inputs, initial being left out where it is None."""
    leaves = [x.detach().requires_grad_() for x in (decay, drive, initial) if x is not None]
    states = linear_scan(*leaves, **options)
    return states.detach(), *torch.autograd.grad(states, leaves, grad)


def check(tensors, backend, reverse):
    """Compares states and gradients with the float64 reference."""
    doubles = [None if x is None else x.double() for x in tensors]
    results = (
        run(*tensors, backend=backend, reverse=reverse),
        run(*tensors, backend="reference", reverse=reverse),
        run(*doubles, backend="reference", reverse=reverse),
    )
    for name, actual, own, exact in zip(NAMES, *results, strict=False):
        assert_as_accurate(f"{backend} {name}", actual, own, exact)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_constant_decay_is_a_geometric_sum(backend, reverse):
    decay = torch.tensor([0.0, 0.5, -0.9, 1.0]).double().expand(2, 9, 4)
    initial = torch.full((2, 4), 3.0).double()
    states = linear_scan(decay, torch.ones_like(decay), initial, reverse=reverse, backend=backend)
    for k in range(9):
        expected = sum(decay[0, 0] ** j for j in range(k + 1)) + decay[0, 0] ** (k + 1) * 3
        torch.testing.assert_close(states[:, 8 - k if reverse else k], expected.expand(2, 4))


@pytest.mark.parametrize("T", [*range(1, 71), *range(127, 131), *range(1023, 1026), 4097])
@pytest.mark.parametrize("reverse", [False, True])
def test_cpu_agrees_with_the_float64_reference(T, reverse):
    for B, D in ((1, 1), (3, 17), (1, 64)):
        decay, drive, initial, grad = inputs(B, T, D, seed=T)
        check((decay, drive, initial, grad), "cpu", reverse)
        check((decay, drive, None, grad), "cpu", reverse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("B", [1, 2, 3, 7])
@pytest.mark.parametrize("D", [5, 32])  # 32: results are written past the caches, or pretend to be too large for them
def test_cuts_between_cores_change_no_bit(B, D, dtype, threads, monkeypatch, nan_memory):
    monkeypatch.setattr(linear_cpu_kernels, "SMALLEST_PIECE", 1)
    monkeypatch.setattr(linear_cpu_kernels, "LARGEST_CACHED", 0)
    for T, scale, reverse in ((1, 1, False), (3, 1, True), (90, 1, True), (91, 1, False), (90, 1.1, False)):
        decay, drive, initial, grad = inputs(B, T, D, dtype=dtype, seed=T)
        for start in (initial, None):
            tensors = scale * decay, drive, start, grad
            expected = run(*tensors, backend="reference", reverse=reverse)
            for count in (1, 2, 3, 5):
                threads(count)
                actual = run(*tensors, backend="cpu", reverse=reverse)
                for name, x, y in zip(NAMES, actual, expected, strict=False):
                    assert torch.equal(x, y), f"{name} with {count} threads at T = {T}"


def test_many_sequences_are_shared_out_whole(threads, monkeypatch):
    monkeypatch.setattr(linear_cpu_kernels, "SMALLEST_PIECE", 1)
    tensors = inputs(50, 7, 16)
    expected = run(*tensors, backend="reference")
    for largest_cached in (0, 2**22):
        monkeypatch.setattr(linear_cpu_kernels, "LARGEST_CACHED", largest_cached)
        for count in (1, 2, 3):
            threads(count)
            assert all(torch.equal(x, y) for x, y in zip(run(*tensors, backend="cpu"), expected, strict=True))


@pytest.mark.parametrize("wanted", [0, 1])
def test_streamed_gradients_alone(wanted, monkeypatch, nan_memory):
    monkeypatch.setattr(linear_cpu_kernels, "LARGEST_CACHED", 0)
    *tensors, _, grad = inputs(2, 9, 16)
    expected = run(*tensors, None, grad, backend="reference")[1 + wanted]
    tensors[wanted].requires_grad_()
    linear_scan(*tensors, backend="cpu").backward(grad)
    assert torch.equal(tensors[wanted].grad, expected)


def test_undamped_states_are_mended_to_the_end(threads):
    threads(2)
    drive = torch.randn(1, 4097, 16)
    ones = torch.ones_like(drive)
    assert torch.equal(linear_scan(ones, drive, backend="cpu"), linear_scan(ones, drive, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_carried_in_float32(backend, dtype):
    tensors = inputs(2, 130, 9, dtype=dtype)
    results = run(*tensors, backend=backend)
    exact = run(*(x.double() for x in tensors), backend="reference")
    for name, actual, expected in zip(NAMES, results, exact, strict=True):
        assert_as_accurate(name, actual, expected.to(dtype), expected)


def test_mixed_dtypes_give_the_wider_one():
    decay, drive, initial, _ = inputs(2, 5, 3)
    assert linear_scan(decay, drive.bfloat16()).dtype == torch.float32
    assert linear_scan(decay.bfloat16(), drive.bfloat16(), initial.double()).dtype == torch.float64


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(3, 8), (3, 8, 6), (3, 8, 2, 3), (3, 8, 2, 1, 3), (0, 8, 6)])
def test_any_trailing_shape(shape, reverse):
    decay, drive, initial, grad = inputs(*shape)
    expected = run(decay, drive, initial, grad, backend="reference", reverse=reverse)
    actual = run(decay, drive, initial, grad, backend="cpu", reverse=reverse)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


STRIDED = {
    "time before batch": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels before time": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second step": lambda x: torch.stack([x, x], dim=2).flatten(1, 2)[:, ::2],
    "every second channel": lambda x: torch.stack([x, x], dim=3).flatten(2)[:, :, ::2],
    "part of a projection": lambda x: torch.cat([x, x], dim=-1)[..., x.shape[-1] :],
    "the same for all steps": lambda x: x[:, :1].expand_as(x),
    "one number": lambda x: x[:1, :1, :1].expand_as(x),
    "negated when read": lambda x: torch.complex(x, -x).conj().imag,
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layout", STRIDED)
def test_any_strides(layout, reverse):
    decay, drive, initial, grad = inputs(3, 70, 9)
    decay, drive, grad = map(STRIDED[layout], (decay, drive, grad))
    initial = initial.t().contiguous().t()
    contiguous = [x.contiguous() for x in (decay, drive, initial, grad)]
    expected = run(*contiguous, backend="reference", reverse=reverse)
    for actual, y in zip(run(decay, drive, initial, grad, backend="cpu", reverse=reverse), expected, strict=True):
        assert torch.equal(actual, y)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 49), unique=True).map(sorted),
    reverse=st.booleans(),
    backend=st.sampled_from(BACKENDS),
    seed=st.integers(0, 2**31),
)
def test_one_call_equals_many_that_hand_over_the_state(cuts, reverse, backend, seed):
    decay, drive, initial, _ = inputs(2, 50, 3, seed=seed)
    whole = linear_scan(decay, drive, initial, reverse=reverse, backend=backend)
    parts, state = [], initial
    spans = list(zip([0, *cuts], [*cuts, 50], strict=True))
    for start, end in spans[::-1] if reverse else spans:
        part = linear_scan(decay[:, start:end], drive[:, start:end], state, reverse=reverse, backend=backend)
        state = part[:, 0 if reverse else -1]
        parts.append(part)
    assert torch.equal(torch.cat(parts[::-1] if reverse else parts, dim=1), whole)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("reference", torch.float64), ("cpu", torch.float64), ("reference", torch.complex128)]
)
@pytest.mark.filterwarnings("ignore:Input #.*requires gradient")
def test_first_and_second_derivatives(backend, dtype, with_initial, reverse):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 3), (2, 4, 3), (2, 3)][: 2 + with_initial]
    leaves = [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]
    scan = lambda *tensors: linear_scan(*tensors, reverse=reverse, backend=backend)  # noqa: E731
    assert torch.autograd.gradcheck(scan, leaves)
    assert torch.autograd.gradgradcheck(scan, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", range(3))
def test_each_gradient_alone(backend, wanted, nan_memory):
    decay, drive, initial, grad = inputs(3, 20, 7)
    expected = run(decay, drive, initial, grad, backend="reference")[1 + wanted]
    tensors = [decay, drive, initial]
    tensors[wanted].requires_grad_()
    linear_scan(*tensors, backend=backend).backward(grad)
    assert torch.equal(tensors[wanted].grad, expected)
    assert all(x.grad is None for i, x in enumerate(tensors) if i != wanted)


class Scans(Dataset):
    """Item i is a scan long enough for several cores."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return linear_scan(*inputs(3, 700, 64, seed=i)[:2], backend="cpu")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_works_in_forked_workers(threads):
    threads(2)
    here = [Scans()[i] for i in range(len(Scans()))]
    loader = DataLoader(Scans(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    assert all(torch.equal(x, y) for x, y in zip(loader, here, strict=True))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_works_in_a_forked_process(threads):
    threads(2)
    expected, context = Scans()[0], torch.multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=lambda: results.put(torch.equal(Scans()[0], expected)))
    process.start()
    process.join(60)
    process.kill()
    assert not results.empty()
    assert results.get()


def test_tensors_without_memory_are_not_read():
    with FakeTensorMode():
        decay, drive, initial, grad = inputs(2, 5, 3)
        assert [x.shape for x in run(decay, drive, initial, grad, backend="cpu")[:3]] == [decay.shape] * 3


def test_without_openmp_one_core_does_all(threads, monkeypatch):
    expected = Scans()[0]
    threads(2)
    monkeypatch.setattr(thread_kernels.ctypes, "CDLL", lambda name: object())
    thread_kernels._parallel.cache_clear()
    try:
        assert torch.equal(Scans()[0], expected)
    finally:
        thread_kernels._parallel.cache_clear()


def test_works_without_a_folder_to_cache_in(monkeypatch):
    expected = Scans()[0]
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    linear_cpu_kernels._worker.cache_clear()
    assert torch.equal(Scans()[0], expected)


def test_importing_compiles_nothing():
    code = "import sys, fprnn_lightning.scan; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_auto_takes_the_fastest_that_can_run(monkeypatch):
    assert resolve_backend(torch.zeros(1)) == resolve_backend(torch.zeros(1, dtype=torch.bfloat16)) == "cpu"
    assert resolve_backend(torch.zeros(1, dtype=torch.complex64)) == "reference"
    assert resolve_backend(torch.zeros(1, device="meta")) == "reference"
    monkeypatch.setitem(backends.INSTALLED, "numba", False)
    assert resolve_backend(torch.zeros(1)) == "reference"


def test_a_backend_that_cannot_run_says_why(monkeypatch):
    x = torch.zeros(2, 3, 4)
    with pytest.raises(
        ValueError, match=r"'cpu' needs real floating-point tensors on the CPU, got torch\.float32 on meta"
    ):
        linear_scan(x.to("meta"), x.to("meta"), backend="cpu")
    with pytest.raises(ValueError, match=r"got torch\.complex64 on cpu"):
        linear_scan(x.to(torch.complex64), x, backend="cpu")
    with pytest.raises(ValueError, match="Unknown scan backend 'gpu': choose auto, reference, cpu or triton"):
        linear_scan(x, x, backend="gpu")
    monkeypatch.setitem(backends.INSTALLED, "numba", False)
    with pytest.raises(ValueError, match="needs numba, which is not installed"):
        linear_scan(x, x, backend="cpu")


@pytest.mark.parametrize(
    ("decay", "drive", "initial", "message"),
    [
        ((2, 3, 4), (2, 3, 1), None, r"one shape .* got \(2, 3, 4\) and \(2, 3, 1\)"),
        ((3,), (3,), None, r"one shape \(B, T, ...\)"),
        ((2, 0, 4), (2, 0, 4), None, "T ≥ 1"),
        ((2, 3, 4), (2, 3, 4), (4,), r"initial state of shape \(2, 4\)"),
    ],
)
def test_wrong_shapes_are_refused(decay, drive, initial, message):
    with pytest.raises(ValueError, match=message):
        linear_scan(torch.zeros(decay), torch.zeros(drive), None if initial is None else torch.zeros(initial))


def test_the_reference_is_the_loop_over_time():
    decay, drive, initial, _ = inputs(2, 3, 4)
    first = decay[:, 0] * initial + drive[:, 0]
    second = decay[:, 1] * first + drive[:, 1]
    expected = torch.stack([first, second, decay[:, 2] * second + drive[:, 2]], dim=1)
    assert torch.equal(linear_reference.forward(decay, drive, initial, False), expected)
