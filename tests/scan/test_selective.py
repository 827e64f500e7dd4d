"""selective_scan and state_space_dual: their definition, every backend against it in float64, what callers rely on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_as_accurate
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from fprnn_lightning.scan import backends, selective_cpu_kernels, selective_scan, state_space_dual

BACKENDS = ("reference", "cpu")
SCANS = {"one decay per state": selective_scan, "one decay per head": state_space_dual}
NAMES = ("y", "last", "grad_x", "grad_dt", "grad_A", "grad_B", "grad_C", "grad_D", "grad_initial")
both_scans = pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS.keys())
all_backends = pytest.mark.parametrize("backend", BACKENDS)


def inputs(scan, B, T, D, N, P=1, dtype=torch.float32, seed=0):
    """x, dt, A, B, C, D, initial for D channels or heads (of P channels), and the gradients to y and the last state.

    A share of the step sizes is zero, a share of the states grows slightly, or not at all.
    """
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    channels, rates = ((D,), (D, N)) if scan is selective_scan else ((D, P), (D,))
    dt, A = random(B, T, D).abs() / 4, -4 * random(*rates).abs()
    dt = torch.where(torch.rand(dt.shape, generator=generator) < 0.1, 0, dt)
    chance = torch.rand(A.shape, generator=generator)
    A = torch.where(chance < 0.1, 0, torch.where(chance < 0.2, 1e-3, A)).to(dtype)
    tensors = random(B, T, *channels), dt, A, random(B, T, N), random(B, T, N), random(D), random(B, *channels, N)
    return tensors, (random(B, T, *channels), random(B, *channels, N))


def run(scan, tensors, grads, **options):
    """y, the last state and the gradients to those inputs that are given."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    outputs = scan(*leaves, **options)
    given = [x for x in leaves if x is not None]
    grads = [grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)]
    return *(x.detach() for x in outputs), *torch.autograd.grad(outputs, given, grads)


def double(tensors):
    return [None if x is None else x.double() for x in tensors]


def check(scan, cases, backend="cpu"):
    """Compares outputs and gradients with the float64 reference, over all cases (tensors, grads) of one shape."""
    results = [
        (
            run(scan, tensors, grads, backend=backend),
            run(scan, tensors, grads, backend="reference"),
            run(scan, double(tensors), double(grads), backend="reference"),
        )
        for tensors, grads in cases
    ]
    for name, *values in zip(
        NAMES, *([torch.stack(x) for x in zip(*each, strict=True)] for each in zip(*results, strict=True)), strict=False
    ):
        assert_as_accurate(f"{backend} {name}", *values)


@all_backends
def test_constant_decay_is_a_geometric_sum(backend):
    dt, A, C = 0.5, torch.tensor([[-1.0, -3.0], [0.0, -0.25]]).double(), torch.tensor([2.0, -1.0]).double()
    ones = torch.ones(1, 9, 2).double()
    y, last = selective_scan(ones, dt * ones, A, 3 * ones, C * ones, C, 4 * ones[:, 0, :, None] * C, backend=backend)
    decay = torch.exp(dt * A)
    for t in range(9):
        state = 3 * dt * sum(decay**k for k in range(t + 1)) + 4 * C * decay ** (t + 1)
        torch.testing.assert_close(y[0, t], state @ C + C)
    torch.testing.assert_close(last[0], state)


@all_backends
@pytest.mark.parametrize("P", [1, 3, 64, 70])
def test_a_head_is_channels_that_share_step_and_decay(P, backend):
    (x, dt, A, B, C, D, initial), _ = inputs(state_space_dual, 2, 40, 3, 5, P, dtype=torch.float64)
    y, last = state_space_dual(x, dt, A, B, C, D, initial, backend=backend)
    dt, A, D = (each.repeat_interleave(P, -1) for each in (dt, A, D))
    A = A[:, None].expand(-1, 5)
    expected, last_expected = selective_scan(x.flatten(2), dt, A, B, C, D, initial.flatten(1, 2), backend="reference")
    torch.testing.assert_close(y, expected.view(y.shape))
    torch.testing.assert_close(last, last_expected.view(last.shape))


@pytest.mark.parametrize("T", [1, 2, 3, 5, 17, 31, 32, 33, 63, 64, 65, 70, 127, 128, 129, 130, 1023, 1024, 1025, 4097])
@both_scans
def test_cpu_agrees_with_the_float64_reference(scan, T):
    sizes = (1, T, 48, 2, 1) if T > 1000 else (2, T, 50, 5, 3)
    tensors, grads = inputs(scan, *sizes, seed=T)
    check(scan, [(tensors, grads)])
    if T < 100:
        check(scan, [((*tensors[:5], None, None), grads)])
        results = (run(scan, double(tensors), double(grads), backend=backend) for backend in BACKENDS[::-1])
        torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)


@both_scans
def test_cpu_agrees_at_every_length_up_to_70(scan):
    for T in range(1, 71):
        check(scan, [inputs(scan, 2, T, 17, 3, 2, seed=seed) for seed in range(1 + 24 // T)])


@both_scans
@pytest.mark.parametrize(("D", "N", "P"), [(1, 1, 1), (1, 16, 1), (64, 1, 2), (65, 3, 1), (130, 17, 3), (2, 4, 100)])
def test_any_number_of_channels_and_states(D, N, P, scan):
    check(scan, [inputs(scan, 2, 35, D, N, P, seed=seed) for seed in range(1 if D > 50 else 24)])


@all_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decays_are_exponentials(dtype, backend):
    exponents = torch.tensor([-1e30, -2e3, -87, -30, -5, -1, -1e-3, 0, 1e-6, 0.3, 3, 60, 87, 2e3, float("inf")])
    A = exponents.to(dtype)[:, None]
    zero, one = torch.zeros(1, 1, len(A), dtype=dtype), torch.ones(1, 1, 1, dtype=dtype)
    _, last = selective_scan(zero, zero + 1, A, one, one, None, zero.mT + 1, backend=backend)
    exact = torch.exp(A.double())
    accuracy = (2 + exponents.abs()[:, None]) * torch.finfo(dtype).eps * exact
    assert torch.where(exact.to(dtype).isinf(), last[0].isinf(), (last[0] - exact).abs() <= accuracy).all()
    assert (
        selective_scan(zero, zero + 1, A * float("nan"), one, one, None, zero.mT + 1, backend=backend)[1].isnan().all()
    )


@all_backends
@both_scans
def test_no_step_keeps_the_state_and_a_large_one_forgets_it(scan, backend):
    (x, dt, A, B, C, _, initial), _ = inputs(scan, 2, 6, 3, 4, 2)
    assert torch.equal(scan(x, 0 * dt, A, B, C, None, initial, backend=backend)[1], initial)
    _, last = scan(x, 0 * dt + 1e6, 0 * A - 1, B, C, None, initial, backend=backend)
    torch.testing.assert_close(last, 1e6 * x[:, -1, ..., None] * B[:, -1].view(2, *[1] * (x.dim() - 2), 4))


@both_scans
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@all_backends
def test_half_precision_is_carried_in_float32(backend, dtype, scan):
    tensors, grads = inputs(scan, 2, 130, 9, 4, 3, dtype=dtype)
    check(scan, [(tensors, grads)], backend)
    _, last = scan(*tensors, backend=backend)
    assert last.dtype == torch.float32
    torch.testing.assert_close(last, scan(*(x.float() for x in tensors), backend=backend)[1])


@all_backends
def test_each_tensor_keeps_its_dtype(backend):
    dtypes = torch.bfloat16, torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float32
    tensors, grads = inputs(selective_scan, 2, 40, 9, 4)
    tensors = [x.to(dtype) for x, dtype in zip(tensors, dtypes, strict=True)]
    check(selective_scan, [(tensors, grads)], backend)
    results = run(selective_scan, tensors, grads, backend=backend)
    assert [x.dtype for x in results] == [torch.bfloat16, torch.float32, *dtypes]


STRIDED = {
    "time before batch": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels before time": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "every second step": lambda x: torch.stack([x, x], dim=2).flatten(1, 2)[:, ::2],
    "every second channel": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "part of a projection": lambda x: torch.cat([x, x], dim=-1)[..., x.shape[-1] :],
    "the same for all steps": lambda x: x[:, :1].expand_as(x),
    "one number": lambda x: x[(slice(1),) * x.dim()].expand_as(x),
    "negated when read": lambda x: torch.complex(x, -x).conj().imag,
}


@pytest.mark.parametrize("layout", STRIDED)
@both_scans
def test_any_strides(scan, layout, nan_memory):
    (x, dt, A, B, C, D, initial), (grad_y, grad_last) = inputs(scan, 3, 70, 9, 4, 2)
    x, dt, B, C, grad_y = map(STRIDED[layout], (x, dt, B, C, grad_y))
    A, initial, grad_last = (each.mT.contiguous().mT if each.dim() > 1 else each for each in (A, initial, grad_last))
    tensors, grads = (x, dt, A, B, C, torch.stack([D, D], 1)[:, 0], initial), (grad_y, grad_last)
    contiguous = [each.contiguous() for each in tensors], [each.contiguous() for each in grads]
    for name, actual, y in zip(NAMES, run(scan, *(tensors, grads)), run(scan, *contiguous), strict=True):
        assert torch.equal(actual, y), name


@both_scans
@pytest.mark.parametrize("B", [1, 3])
def test_cores_change_no_bit(B, scan, threads, monkeypatch, nan_memory):
    monkeypatch.setattr(selective_cpu_kernels, "SMALLEST_PIECE", 1)
    for most_pieces in (1, 64):
        monkeypatch.setattr(selective_cpu_kernels, "MOST_PIECES", most_pieces)
        tensors, grads = inputs(scan, B, 70, 100, 4, 2)
        check(scan, [(tensors, grads)])
        expected = run(scan, tensors, grads, backend="cpu")
        for count in (1, 2, 3):
            threads(count)
            for name, x, y in zip(NAMES, run(scan, tensors, grads, backend="cpu"), expected, strict=True):
                assert torch.equal(x, y), f"{name} with {count} threads"


@both_scans
@all_backends
def test_an_empty_batch(backend, scan):
    tensors, grads = inputs(scan, 0, 5, 3, 2)
    results = run(scan, tensors, grads, backend=backend)
    assert [x.shape for x in results[2:]] == [x.shape for x in tensors]
    assert not results[4].any()


@settings(max_examples=20, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 69), unique=True, max_size=8).map(sorted),
    scan=st.sampled_from([*SCANS.values()]),
    backend=st.sampled_from(BACKENDS),
    seed=st.integers(0, 2**31),
)
def test_one_call_equals_many_that_hand_over_the_state(cuts, scan, backend, seed):
    (x, dt, A, B, C, D, state), _ = inputs(scan, 2, 70, 3, 4, 2, seed=seed)
    whole, last = scan(x, dt, A, B, C, D, state, backend=backend)
    parts = []
    for start, end in zip([0, *cuts], [*cuts, 70], strict=True):
        x_piece, dt_piece, B_piece, C_piece = (each[:, start:end] for each in (x, dt, B, C))
        part, state = scan(x_piece, dt_piece, A, B_piece, C_piece, D, state, backend=backend)
        parts.append(part)
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(state, last)


@all_backends
def test_first_derivatives_are_the_same_where_they_are_differentiated_again(backend):
    """Also where one input is computed from another, or is another."""
    x, _, _, B, *_ = inputs(selective_scan, 1, 5, 3, 3, dtype=torch.float64)[0]

    def gradients(create_graph):
        leaves = x.clone().requires_grad_(), B.clone().requires_grad_()
        dt = torch.nn.functional.softplus(leaves[0] + leaves[1].mean())
        y, last = selective_scan(leaves[0], dt, leaves[1][0, :3] - 2, leaves[1], leaves[1], backend=backend)
        return torch.autograd.grad(y.sum() + last.sum(), leaves, create_graph=create_graph)

    torch.testing.assert_close(gradients(True), gradients(False))


@all_backends
@both_scans
@pytest.mark.parametrize("given", [5, 7])
@pytest.mark.filterwarnings("ignore:Input #.*requires gradient")
def test_first_and_second_derivatives(given, scan, backend):
    tensors, _ = inputs(scan, 2, 3, 2, 2, 2, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in tensors[:given]]
    assert torch.autograd.gradcheck(lambda *each: scan(*each, backend=backend), leaves)
    assert torch.autograd.gradgradcheck(lambda *each: scan(*each, backend=backend), leaves)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside took at a time."""

    def __init__(self, *existing):
        super().__init__()
        self.existing = {x.untyped_storage()._cdata for x in existing}
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **kwargs or {})
        for x in tree_leaves(outputs):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.existing:
                storage = x.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: (ref, size) for key, (ref, size) in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return outputs


def extra_memory(T, backend):
    """The peak of forward and backward beyond inputs, outputs and gradients, in units of the size of x."""
    tensors, grads = inputs(selective_scan, 4, T, 128, 16)
    leaves = [x.requires_grad_() for x in tensors]
    with LiveBytes(*tensors, *grads) as memory:
        outputs = selective_scan(*leaves, backend=backend)
        torch.autograd.backward(outputs, grads)
    results = *outputs, *(x.grad for x in leaves)
    return (memory.peak - sum(x.nbytes for x in results)) / tensors[0].nbytes


def test_states_are_not_kept(threads):
    threads(2)
    assert extra_memory(512, "cpu") < 2
    assert extra_memory(32, "reference") > 16


class Scans(Dataset):
    """Item i is a scan long enough for several cores."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return selective_scan(*inputs(selective_scan, 3, 700, 64, 4, seed=i)[0], backend="cpu")[0]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_works_in_forked_workers(threads):
    threads(2)
    here = [Scans()[i] for i in range(len(Scans()))]
    loader = DataLoader(Scans(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    assert all(torch.equal(x, y) for x, y in zip(loader, here, strict=True))


def test_without_numba_the_reference_runs(monkeypatch):
    tensors, _ = inputs(selective_scan, 2, 5, 3, 2)
    expected = selective_scan(*tensors, backend="reference")
    monkeypatch.setitem(backends.INSTALLED, "numba", False)
    assert all(torch.equal(x, y) for x, y in zip(selective_scan(*tensors), expected, strict=True))
    with pytest.raises(ValueError, match="'cpu' needs numba, which is not installed"):
        selective_scan(*tensors, backend="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: (2, 3)}, r"selective_scan needs x of shape \(B, T, D\) with T ≥ 1, got \(2, 3\)"),
        ({0: (2, 0, 4)}, r"x of shape \(B, T, D\) with T ≥ 1, got \(2, 0, 4\)"),
        ({1: (2, 3, 1)}, r"dt of shape \(B, T, D\) = \(2, 3, 4\), got \(2, 3, 1\)"),
        ({2: (4,)}, r"A of shape \(D, N\) = \(4, 5\), got \(4,\)"),
        ({3: (2, 3, 6)}, r"A of shape \(D, N\) = \(4, 6\), got \(4, 5\)"),
        ({4: (2, 3, 6)}, r"C of shape \(B, T, N\) = \(2, 3, 5\), got \(2, 3, 6\)"),
        ({5: (5,)}, r"D of shape \(D\) = \(4,\), got \(5,\)"),
        ({6: (2, 5, 4)}, r"initial of shape \(B, D, N\) = \(2, 4, 5\), got \(2, 5, 4\)"),
    ],
)
def test_wrong_shapes_are_refused(changes, message):
    shapes = [(2, 3, 4), (2, 3, 4), (4, 5), (2, 3, 5), (2, 3, 5), (4,), (2, 4, 5)]
    tensors = [torch.zeros(changes.get(i, shape)) for i, shape in enumerate(shapes)]
    with pytest.raises(ValueError, match=message):
        selective_scan(*tensors)


@both_scans
def test_wrong_devices_and_dtypes_are_refused(scan):
    tensors, _ = inputs(scan, 2, 3, 4, 5, 2)
    with pytest.raises(ValueError, match="one device, got x on cpu, dt on meta"):
        scan(tensors[0], tensors[1].to("meta"), *tensors[2:])
    with pytest.raises(ValueError, match=r"real floating-point tensors, x is torch\.complex64"):
        scan(tensors[0].to(torch.complex64), *tensors[1:])
    with pytest.raises(ValueError, match=r"real floating-point tensors, B is torch\.int64"):
        scan(*tensors[:3], tensors[3].long(), *tensors[4:])


@all_backends
@pytest.mark.parametrize("given", [5, 7])
def test_custom_operators_are_registered_in_full(given, backend):
    operators = torch.ops.fprnn_lightning
    (x, dt, A, B, C, D, initial), (grad_y, grad_last) = inputs(state_space_dual, 2, 40, 3, 4, 2)
    optional = (D[:, None].expand(3, 2), initial) if given == 7 else (None, None)
    arguments = x, dt, A[:, None], B, C, *optional, backend
    torch.library.opcheck(operators.selective_scan.default, arguments)
    *_, boundaries = operators.selective_scan(*arguments)
    torch.library.opcheck(operators.selective_scan_backward.default, (grad_y, grad_last, boundaries, *arguments))


@both_scans
@all_backends
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_to_one_graph(scan, backend):
    tensors, grads = inputs(scan, 2, 40, 3, 4, 2)
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    for some in (tensors, (*tensors[:5], None, None)):
        results = (run(each, some, grads, backend=backend) for each in (compiled, scan))
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@all_backends
def test_tensors_without_memory_are_not_read(backend):
    with FakeTensorMode():
        tensors, grads = inputs(selective_scan, 2, 40, 3, 4)
        shapes = [x.shape for x in run(selective_scan, tensors, grads, backend=backend)]
    assert shapes == [x.shape for x in (grads[0], grads[1], *tensors)]
