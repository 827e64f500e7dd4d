"""linear_scan in Triton against the float64 reference: every tiling, dtype and layout, and as an operator of torch."""

import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_linear import STRIDED, check, inputs, run
from tolerances import assert_as_accurate

from fprnn_lightning.scan import linear_scan, linear_triton_kernels

SPLIT = pytest.mark.parametrize("split", [False, True], ids=["walk", "split"])
REVERSE = pytest.mark.parametrize("reverse", [False, True], ids=["onwards", "reverse"])


@pytest.fixture
def tile(monkeypatch):
    """Sets the steps of a tile, in a thread and across threads, its channels, and if each has a program of its own."""

    def choose(inner: int, outer: int, split: bool, channels: int = 4) -> None:
        config = triton.Config({"INNER": inner, "OUTER": outer, "BLOCK_D": channels}, num_warps=1)
        monkeypatch.setattr(linear_triton_kernels, "CONFIGS", dict.fromkeys(linear_triton_kernels.CONFIGS, config))
        monkeypatch.setattr(linear_triton_kernels, "_are_few", lambda *_: split)
        monkeypatch.setattr(linear_triton_kernels, "SHORT", 0)

    return choose


def on(device, tensors):
    return [x.to(device) for x in tensors]


@pytest.mark.parametrize("T", [1, 2, 3, 5, 9])
@SPLIT
@REVERSE
def test_agrees_with_the_float64_reference(T, split, reverse, tile, device):
    tile(2, 2, split)
    decay, drive, initial, grad = on(device, inputs(2, T, 5, seed=T))
    check((decay, drive, initial, grad), "triton", reverse)
    check((decay, drive, None, grad), "triton", reverse)


@pytest.mark.parametrize("lengths", [[*range(1, 18), 31, 63, 70], pytest.param(range(1, 71), marks=pytest.mark.slow)])
@SPLIT
def test_agrees_at_every_length(lengths, split, tile, device):
    tile(2, 4, split)
    for T in lengths:
        check(on(device, inputs(1, T, 2, seed=T)), "triton", reverse=T % 2 == 0)


@pytest.mark.parametrize("T", [31, 32, 33, 64, 70, 127, 128, 129, 130, 1023, 1024, 1025, 4097])
@SPLIT
def test_agrees_over_more_steps(T, split, tile, device):
    outer, D = (4, 4) if T < 1000 else (32, 2)
    tile(8, outer, split, channels=D)
    check(on(device, inputs(1, T, D, seed=T)), "triton", reverse=T % 2 == 0)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_states_are_handed_from_program_to_program(parts, tile, device, nan_memory):
    tile(2, 4, split=True)
    for T in (8 * parts - 7, 8 * parts):
        check(on(device, inputs(2, T, 5, seed=parts)), "triton", reverse=False)


@pytest.mark.parametrize(("B", "T", "D"), [(2, 9, 3), (1, 257, 3)])
def test_with_the_tiles_it_chooses(B, T, D, device, nan_memory):
    check(on(device, inputs(B, T, D)), "triton", reverse=False)


def test_programs_are_made_when_channels_are_too_few():
    are_few = lambda *shape: linear_triton_kernels._are_few(*shape, torch.empty(0))  # noqa: E731
    assert are_few(1, 256)
    assert not are_few(70000, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_waits_for_the_program_before(dtype, device, nan_memory):
    """On a GPU programs run at once and do wait; any order in which they come must give the same bits."""
    decay, drive, *_ = (x.to(device, dtype) for x in inputs(1, 65536 if device == "cuda" else 300, 33))
    states = linear_scan(decay, drive, backend="triton")
    for _ in range(1000 if device == "cuda" else 1):
        assert torch.equal(linear_scan(decay, drive, backend="triton"), states)
    exact = linear_scan(decay.double(), drive.double(), backend="reference")
    assert_as_accurate("states", states, linear_scan(decay, drive, backend="reference"), exact)


@SPLIT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_is_carried_in_float32_or_float64(dtype, split, tile, device):
    tile(2, 4, split)
    tensors = on(device, inputs(2, 33, 5, dtype=dtype))
    exact = run(*(x.double() for x in tensors), backend="reference")
    for name, actual, expected in zip("hadi", run(*tensors, backend="triton"), exact, strict=True):
        assert_as_accurate(name, actual, expected.to(dtype), expected)


@REVERSE
@pytest.mark.parametrize("layout", STRIDED)
def test_any_strides(layout, reverse, tile, device):
    tile(2, 4, split=False)
    decay, drive, initial, grad = on(device, inputs(2, 10, 3))
    decay, drive, grad = map(STRIDED[layout], (decay, drive, grad))
    initial = initial.t().contiguous().t()
    check((decay, drive, initial, grad), "triton", reverse)


@pytest.mark.parametrize("shape", [(3, 8), (2, 8, 2, 1, 3), (0, 8, 6), (2, 8, 0)])
def test_any_trailing_shape(shape, tile, device):
    tile(2, 2, split=False)
    tensors = on(device, inputs(*shape))
    expected = run(*tensors, backend="reference")
    for actual, y in zip(run(*tensors, backend="triton"), expected, strict=True):
        torch.testing.assert_close(actual, y)
        assert actual.is_contiguous()


@SPLIT
@pytest.mark.parametrize("wanted", range(3))
def test_each_gradient_alone(wanted, split, tile, device, nan_memory):
    tile(2, 2, split)
    tensors = on(device, inputs(2, 9, 5))
    expected = run(*tensors, backend="reference")[1 + wanted]
    *tensors, grad = tensors
    tensors[wanted].requires_grad_()
    linear_scan(*tensors, backend="triton").backward(grad)
    torch.testing.assert_close(tensors[wanted].grad, expected)


def test_a_nan_of_any_bits_is_handed_over(tile, device):
    tile(2, 2, split=True)
    decay, drive, *_ = on(device, inputs(1, 9, 3))
    drive.view(torch.int32)[0, 2, 1] = -1  # the bits of a slot that is still empty
    states = linear_scan(decay, drive, backend="triton")
    assert states[0, 2:, 1].isnan().all()
    assert states.isnan().sum() == 7


@SPLIT
def test_sequences_and_channels_do_not_mix(split, tile, device):
    tile(2, 2, split)
    decay, drive, initial, grad = on(device, inputs(3, 9, 6))
    drive[1, 4, 5] = torch.nan
    states, _, grad_drive, _ = run(decay, drive, initial, grad, backend="triton")
    assert states[1, 4:, 5].isnan().all()
    assert states.isnan().sum() == 5
    assert not grad_drive.isnan().any()


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 19), unique=True, max_size=2).map(sorted), reverse=st.booleans())
@SPLIT
def test_one_call_equals_many_that_hand_over_the_state(cuts, reverse, split, tile, device):
    tile(2, 4, split)
    decay, drive, initial, _ = on(device, inputs(2, 20, 3))
    whole = linear_scan(decay, drive, initial, reverse=reverse, backend="triton")
    parts, state = [], initial
    spans = list(zip([0, *cuts], [*cuts, 20], strict=True))
    for start, end in spans[::-1] if reverse else spans:
        part = linear_scan(decay[:, start:end], drive[:, start:end], state, reverse=reverse, backend="triton")
        state = part[:, 0 if reverse else -1]
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts[::-1] if reverse else parts, dim=1), whole)


@pytest.mark.parametrize(("split", "reverse", "with_initial"), [(False, False, True), (True, True, False)])
def test_first_and_second_derivatives(split, reverse, with_initial, tile, device):
    tile(1, 1, split, channels=1)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 1), (1, 2, 1), (1, 1)][: 2 + with_initial]
    leaves = [torch.randn(shape, generator=generator).double().to(device).requires_grad_() for shape in shapes]
    scan = lambda *tensors: linear_scan(*tensors, reverse=reverse, backend="triton")  # noqa: E731
    assert torch.autograd.gradcheck(scan, leaves)
    assert torch.autograd.gradgradcheck(scan, leaves)


BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])


@BACKENDS
@pytest.mark.parametrize("with_initial", [False, True])
def test_is_a_well_formed_operator(backend, with_initial, tile, device):
    tile(2, 2, split=False)
    decay, drive, initial, grad = on(device if backend == "triton" else "cpu", inputs(2, 5, 3))
    initial = initial if with_initial else None
    states = linear_scan(decay, drive, initial, reverse=True, backend="reference")
    operators = torch.ops.fprnn_lightning
    torch.library.opcheck(operators.linear_scan, (decay, drive, initial, True, backend))
    for needed in ([True, True, with_initial], [False, True, False]):
        arguments = (grad, decay, initial, states, True, needed, backend)
        torch.library.opcheck(operators.linear_scan_backward, arguments)


@BACKENDS
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_breaking_the_graph(backend, tile, device):
    tile(2, 2, split=True)
    tensors = on(device if backend == "triton" else "cpu", inputs(2, 5, 3))
    leaves = [x.requires_grad_() for x in tensors[:3]]
    scan = lambda *inputs: linear_scan(*inputs, backend=backend).sin()  # noqa: E731
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    results = [[y.detach(), *torch.autograd.grad(y, leaves, tensors[3])] for y in (scan(*leaves), compiled(*leaves))]
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager)
