"""selective_scan and state_space_dual in Triton against the float64 reference, and as operators of torch.

Mostly with tiles of few channels and chunks of few steps, as the interpreter takes long for each step.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_selective import SCANS, STRIDED, both_scans, check, inputs, run

from fprnn_lightning.scan import selective_scan, selective_triton_kernels, state_space_dual


@pytest.fixture
def small(monkeypatch):
    """Chunks of 4 steps in parts of 2, 4 threads in a warp; sets into how many segments a sweep is cut."""

    def choose(segments: int = 1) -> None:
        sizes = lambda N, warp: selective_triton_kernels._sizes(N, warp, 2) | {"STEPS": 2}  # noqa: E731
        for name, value in {"CHUNK": 4, "WARP": 4, "sweep_sizes": sizes, "gradient_sizes": sizes}.items():
            monkeypatch.setattr(selective_triton_kernels, name, value)
        monkeypatch.setattr(selective_triton_kernels, "_span", lambda chunks, rows, device: -(-chunks // segments))

    return choose


def on(device, case):
    return [[None if x is None else x.to(device) for x in each] for each in case]


@both_scans
@pytest.mark.parametrize("T", [1, 2, 5])
def test_agrees_with_the_float64_reference(scan, T, small, device, nan_memory):
    small()
    tensors, grads = on(device, inputs(scan, 1, T, 3, 3, 3, seed=T))
    check(scan, [(tensors, grads)], "triton")
    check(scan, [((*tensors[:5], None, None), grads)], "triton")


@both_scans
@pytest.mark.parametrize("T", [31, 65])
def test_agrees_with_the_chunks_and_tiles_it_chooses(scan, T, device, nan_memory):
    check(scan, [on(device, inputs(scan, 1, T, 2, 2, 2, seed=T))], "triton")


@both_scans
@pytest.mark.parametrize(("D", "N", "P"), [(1, 1, 1), (5, 2, 1), (9, 3, 1), (2, 16, 3), (1, 17, 5)])
def test_any_number_of_channels_and_states(scan, D, N, P, small, device, nan_memory):
    small()
    check(scan, [on(device, inputs(scan, 1, 3, D, N, P, seed=seed)) for seed in range(2)], "triton")


@both_scans
@pytest.mark.parametrize("segments", [2, 3])
@pytest.mark.parametrize("given", [5, 7])
def test_states_are_handed_from_segment_to_segment(scan, given, segments, small, device, nan_memory):
    small(segments)
    tensors, grads = on(device, inputs(scan, 2, 8 * segments - 5, 2, 2, 2))
    check(scan, [((*tensors[:given], None, None)[:7], grads)], "triton")


@both_scans
@pytest.mark.parametrize(("groups", "spans"), [(2, 1), (2, 2)])
def test_channels_and_chunks_are_shared_out(scan, groups, spans, small, device, monkeypatch, nan_memory):
    small()
    monkeypatch.setattr(selective_triton_kernels, "_groups", lambda *_: (groups, spans))
    check(scan, [on(device, inputs(scan, 1, 6, 5, 3, 3))], "triton")


def test_few_long_sequences_are_cut(device):
    cpu = torch.device("cpu")
    assert selective_triton_kernels._span(512, 1, cpu) < 512
    assert selective_triton_kernels._span(512, 1000, cpu) == 512
    groups, spans = selective_triton_kernels._groups(1, 512, 256, 16, cpu)
    assert groups * spans >= 8
    assert selective_triton_kernels._groups(1, 1, 256, 16, cpu)[0] <= 4


@both_scans
def test_no_step_keeps_the_state_and_a_large_one_forgets_it(scan, small, device):
    small(segments=2)
    (x, dt, A, B, C, _, initial), _ = on(device, inputs(scan, 2, 6, 3, 4, 2))
    assert torch.equal(scan(x, 0 * dt, A, B, C, None, initial, backend="triton")[1], initial)
    tensors, grads = on(device, inputs(scan, 2, 6, 3, 4, 2))
    tensors[1], tensors[2] = 0 * dt + 1e6, 0 * A - 1
    check(scan, [(tensors, grads)], "triton")


@both_scans
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_is_carried_in_float32_or_float64(dtype, scan, small, device):
    small(segments=2)
    tensors, grads = on(device, inputs(scan, 1, 6, 3, 2, 3, dtype=dtype))
    check(scan, [(tensors, grads)], "triton")
    assert scan(*tensors, backend="triton")[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_each_tensor_keeps_its_dtype(small, device):
    small()
    dtypes = torch.bfloat16, torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float32
    tensors, grads = on(device, inputs(selective_scan, 1, 6, 3, 2))
    tensors = [x.to(dtype) for x, dtype in zip(tensors, dtypes, strict=True)]
    check(selective_scan, [(tensors, grads)], "triton")
    results = run(selective_scan, tensors, grads, backend="triton")
    assert [x.dtype for x in results] == [torch.bfloat16, torch.float32, *dtypes]


@pytest.mark.parametrize("layout", STRIDED)
@both_scans
def test_any_strides(scan, layout, small, device, nan_memory):
    small()
    (x, dt, A, B, C, D, initial), (grad_y, grad_last) = on(device, inputs(scan, 2, 3, 2, 2, 2))
    x, dt, B, C, grad_y = map(STRIDED[layout], (x, dt, B, C, grad_y))
    A, initial, grad_last = (each.mT.contiguous().mT if each.dim() > 1 else each for each in (A, initial, grad_last))
    tensors, grads = (x, dt, A, B, C, torch.stack([D, D], 1)[:, 0], initial), (grad_y, grad_last)
    contiguous = [each.contiguous() for each in tensors], [each.contiguous() for each in grads]
    results = run(scan, tensors, grads, backend="triton"), run(scan, *contiguous, backend="triton")
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_a_decay_that_overflows_leaves_an_empty_state_empty(small, device):
    small(segments=3)
    (x, dt, A, B, C, _, _), _ = on(device, inputs(selective_scan, 1, 12, 2, 2))
    y, last = selective_scan(0 * x, 0 * dt + 60, 0 * A + 1, B, C, backend="triton")
    assert not y.any()
    assert not last.any()


@both_scans
@pytest.mark.parametrize(("batch", "channels"), [(0, 3), (2, 0)])
def test_nothing_to_scan(scan, batch, channels, device):
    tensors, grads = on(device, inputs(scan, batch, 5, channels, 2))
    results = run(scan, tensors, grads, backend="triton")
    assert [x.shape for x in results[2:]] == [x.shape for x in tensors]
    assert not results[4].any()


@both_scans
def test_sequences_and_channels_do_not_mix(scan, small, device):
    small()
    tensors, grads = on(device, inputs(scan, 2, 5, 6, 2, 1))
    tensors[0][1, 2, 5] = torch.nan
    y, last, grad_x, *_ = run(scan, tensors, grads, backend="triton")
    assert y[1, 2:, 5].isnan().all()
    assert y.isnan().sum() == y[1, 2:, 5].numel()
    assert last.isnan().sum() == last[1, 5].numel()
    assert not grad_x.isnan().any()


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 8), unique=True, max_size=2).map(sorted), scan=st.sampled_from([*SCANS.values()]))
def test_one_call_equals_many_that_hand_over_the_state(cuts, scan, small, device):
    small()
    (x, dt, A, B, C, D, state), _ = on(device, inputs(scan, 1, 9, 3, 2, 1))
    whole, last = scan(x, dt, A, B, C, D, state, backend="triton")
    parts = []
    for start, end in zip([0, *cuts], [*cuts, 9], strict=True):
        x_piece, dt_piece, B_piece, C_piece = (each[:, start:end] for each in (x, dt, B, C))
        part, state = scan(x_piece, dt_piece, A, B_piece, C_piece, D, state, backend="triton")
        parts.append(part)
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(state, last)


@pytest.mark.parametrize("given", [5, 7])
def test_is_a_well_formed_operator(given, device):
    operators = torch.ops.fprnn_lightning
    (x, dt, A, B, C, D, initial), grads = on(device, inputs(state_space_dual, 1, 2, 3, 2, 2))
    optional = (D[:, None].expand(3, 2), initial) if given == 7 else (None, None)
    arguments = x, dt, A[:, None], B, C, *optional, "triton"
    torch.library.opcheck(operators.selective_scan.default, arguments)
    *_, boundaries = operators.selective_scan(*arguments)
    torch.library.opcheck(operators.selective_scan_backward.default, (*grads, boundaries, *arguments))


@both_scans
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_breaking_the_graph(scan, small, device):
    small()
    tensors, grads = on(device, inputs(scan, 1, 2, 3, 2, 2))
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    for some in (tensors, (*tensors[:5], None, None)):
        results = run(compiled, some, grads, backend="triton"), run(scan, some, grads, backend="triton")
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y)
