"""What ranks do in the tests of context parallelism, and one process does alone to compare."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from fprnn_lightning.mixers import SequenceMixer
from fprnn_lightning.model import SequenceModel
from fprnn_lightning.scan import context_parallel, linear_reference, linear_scan, selective_scan, state_space_dual

Groups = dict[int, dist.ProcessGroup]


class Result(NamedTuple):
    """Tensors (B, T, ...) of a slice, and others whose sum over the slices is to be that of the whole."""

    sliced: dict[str, Tensor]
    summed: dict[str, Tensor]


class Slice(NamedTuple):
    """One of consecutive slices of time."""

    lengths: Sequence[int]
    rank: int

    def cut(self, x: Tensor) -> Tensor:
        return x.split(list(self.lengths), 1)[self.rank]

    @property
    def is_last(self) -> bool:
        return self.rank == len(self.lengths) - 1


def on_slices(groups: Groups, work: Callable[..., Any], lengths: Sequence[int], *arguments: Any) -> Any:
    """What work gives on this rank's slice, nothing on ranks without one."""
    if dist.get_rank() >= len(lengths):
        return None
    with context_parallel(groups[len(lengths)]) as slices:
        return work(Slice(lengths, slices.rank), *arguments)


def device() -> torch.device:
    """Where tensors of this process go."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def joined(results: Sequence[Result | None]) -> dict[str, Tensor]:
    """The results of all slices as those of the whole."""
    results = [result for result in results if result is not None]
    sliced = {name: torch.cat([result.sliced[name] for result in results], 1) for name in results[0].sliced}
    return sliced | {name: sum(result.summed[name] for result in results) for name in results[0].summed}


def _strided(x: Tensor, is_strided: bool) -> Tensor:
    return torch.stack([x, x], -1)[..., 0] if is_strided else x.clone()


def _leaves(here: Slice, tensors: dict[str, Tensor | None], uncut: Sequence[str], is_strided: bool, dtype: torch.dtype):
    leaves = {}
    for name, x in tensors.items():
        if x is not None:
            x = _strided((x if name in uncut else here.cut(x)).to(device(), dtype), is_strided)
            leaves[name] = x.requires_grad_()
    return leaves


def _result(leaves: dict[str, Tensor], outputs: dict[str, Tensor], gradients: Sequence[Tensor], uncut) -> Result:
    named = {name: x.cpu() for name, x in zip(leaves, gradients, strict=True)}
    sliced = {f"grad_{name}": x for name, x in named.items() if name not in uncut}
    summed = {f"grad_{name}": x for name, x in named.items() if name in uncut}
    return Result({name: x.detach().cpu() for name, x in outputs.items()} | sliced, summed)


def scan_linearly(
    here: Slice, shape, dtype, seed, *, initial=True, reverse=False, strided=False, backend="auto", scan=linear_scan
):
    """States and gradients of a linear scan; a share of the decays is 0, 1, -1 or next to 1."""
    generator = torch.Generator().manual_seed(seed)
    decay = 2 * torch.rand(shape, generator=generator) - 1
    special = torch.tensor([0.0, 1.0, -1.0, 1 - 2**-12])
    choice = torch.randint(2 * len(special), shape, generator=generator)
    decay = torch.where(choice < len(special), special[choice % len(special)], decay)
    drive, grad = torch.randn(2, *shape, generator=generator)
    start = torch.randn(shape[0], *shape[2:], generator=generator) if initial else None
    if dtype.is_complex:
        decay, drive, grad = (x * torch.polar(torch.ones(shape), drive) for x in (decay, drive, grad))
    leaves = _leaves(here, {"decay": decay, "drive": drive, "initial": start}, ["initial"], strided, dtype)
    states = scan(**leaves, reverse=reverse, backend=backend)
    gradients = torch.autograd.grad(
        states, list(leaves.values()), _strided(here.cut(grad).to(device(), dtype), strided)
    )
    return _result(leaves, {"states": states}, gradients, ["initial"])


def scan_selectively(here: Slice, shape, dtype, seed, *, dual=False, options=True, strided=False, backend="auto"):
    """Outputs and gradients of Mamba's scan, or Mamba-2's, over (B, T, H, P, N); some dt are 0, some large."""
    B, T, H, P, N = shape
    generator = torch.Generator().manual_seed(seed)
    dt = torch.rand(B, T, H, generator=generator)
    choice = torch.randint(8, dt.shape, generator=generator)
    dt = torch.where(choice == 0, 0.0, torch.where(choice == 1, 1000.0 * (dt > 0.9), dt))
    x, grad = torch.randn(2, B, T, H, *([P] if dual else []), generator=generator)
    tensors = {"x": x, "dt": dt, "A": -torch.rand(H, *([] if dual else [N]), generator=generator)}
    tensors |= {name: torch.randn(B, T, N, generator=generator) for name in ("B", "C")}
    tensors["D"] = torch.randn(H, generator=generator) if options else None
    state = torch.randn(2, B, H, *([P] if dual else []), N, generator=generator)
    tensors["initial"] = state[0] if options else None
    uncut = ["A", "D", "initial"]
    leaves = _leaves(here, tensors, uncut, strided, dtype)
    y, last = (state_space_dual if dual else selective_scan)(**leaves, backend=backend)
    grad_last = state[1].to(last) if here.is_last else torch.zeros_like(last)
    gradients = torch.autograd.grad((y, last), list(leaves.values()), (here.cut(grad).to(device(), dtype), grad_last))
    result = _result(leaves, {"y": y}, gradients, uncut)
    return result._replace(summed=result.summed | {"last": last.detach().cpu() * here.is_last})


def mix(here: Slice, make: Callable[[int], SequenceMixer], shape, *, training=True, loops=1):
    """Outputs and gradients of a mixer in float64, the last of some forwards, and what it tells about itself."""
    torch.manual_seed(0)
    mixer = make(shape[2]).to(device(), torch.double).train(training)
    with torch.no_grad():
        for weights in mixer.terms.parameters():
            weights *= 2  # away from the start of training, where cores hardly mix
    x = torch.randn(shape, dtype=torch.double) * torch.logspace(-1, 0.5, shape[0], dtype=torch.double)[:, None, None]
    x = here.cut(x).to(device()).contiguous().requires_grad_()
    for _ in range(loops):
        y = mixer(x)
    y.sin().sum().backward()
    report = {name: value.double().cpu() for name, value in mixer.diagnostics().items()}
    gradients = {name: parameter.grad.cpu() for name, parameter in mixer.named_parameters()}
    return Result({"y": y.detach().cpu(), "x": x.grad.cpu()}, gradients), report


def learn(groups: Groups, make: Callable[[], SequenceModel], tokens: Tensor, targets: Tensor):
    """Logits of this rank's slice by a model, and the gradients of the mean loss, summed over all ranks."""
    model = new_model(make)
    with context_parallel() as slices:
        tokens, targets = slices.cut(tokens), slices.cut(targets)
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / slices.total((targets != -100).sum())
    loss.backward()
    slices.sum_gradients(model.parameters())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return logits.detach(), gradients, slices.total(loss)


def learn_in_parallel(groups: Groups, make: Callable[[], SequenceModel], tokens: Tensor, targets: Tensor):
    """The same, where each half of the ranks has half of the batch, and slices of it, and DDP sums the gradients."""
    half = dist.get_rank() // 2
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][half]
    tokens, targets = (part.chunk(2)[half] for part in (tokens, targets))
    model = nn.parallel.DistributedDataParallel(new_model(make))
    with context_parallel(group) as slices:
        tokens, targets = slices.cut(tokens), slices.cut(targets)
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        scored = (targets != -100).sum()
        dist.all_reduce(scored)
        (loss / scored * dist.get_world_size()).backward()  # DDP takes the mean
    return logits.detach(), {name: parameter.grad for name, parameter in model.module.named_parameters()}


def new_model(make: Callable[[], SequenceModel]) -> SequenceModel:
    torch.manual_seed(0)
    return make().double()


def count(groups: Groups, lengths: Sequence[int], work: Callable[..., Any], *arguments: Any) -> list:
    """What is sent from this rank: the calls of all_gather and of sends to a neighbour, each with its bytes."""
    calls: list = []
    gather, send = dist.all_gather, dist.batch_isend_irecv

    def counted_gather(every, x, group):
        calls.append(("gather", x.nbytes))
        return gather(every, x, group)

    def counted_send(transfers):
        calls.extend(("send", transfer.tensor.nbytes) for transfer in transfers if transfer.op is dist.isend)
        return send(transfers)

    dist.all_gather, dist.batch_isend_irecv = counted_gather, counted_send
    try:
        on_slices(groups, work, lengths, *arguments, calls)
    finally:
        dist.all_gather, dist.batch_isend_irecv = gather, send
    return calls


def count_scan(here: Slice, shape, dtype, selective: bool, calls: list) -> None:
    """A scan of slices (B, T, D) and its backward, with a mark between them."""
    states = 5
    x, y = torch.rand(2, *shape, dtype=dtype).unbind()
    x.requires_grad_()
    if selective:
        b, c = torch.rand(2, *shape[:2], states, dtype=dtype)
        y, _ = selective_scan(y, x, -torch.ones(shape[2], states, dtype=dtype), b, c)
    else:
        y = linear_scan(x, y)
    calls.append("backward")
    y.sum().backward()


def count_mixer(here: Slice, make: Callable[[int], SequenceMixer], shape, training: bool, calls: list) -> None:
    """A mixer and its backward on slices (B, T, width), with a mark between them."""
    y = make(shape[2]).train(training)(torch.randn(shape))
    calls.append("backward")
    y.sum().backward()


def mix_nan(here: Slice, make: Callable[[int], SequenceMixer], width: int) -> dict[str, Tensor]:
    """What a mixer tells, where of two sequences one has a nan in the second slice."""
    torch.manual_seed(0)
    mixer = make(width)
    x = torch.randn(2, 8, width)
    x[1, 5] = torch.nan
    mixer(here.cut(x)).sum().backward()
    return mixer.diagnostics()


def refused(groups: Groups, make: Callable[[], SequenceModel]) -> list[str]:
    """What is said to what cannot be done."""
    said, model = [], make().eval()
    tokens, mixer = torch.zeros(1, 4, dtype=torch.long), model.blocks[0].mixer
    with context_parallel() as slices:
        for attempt in (
            lambda: model(tokens),
            lambda: model.prefill(tokens),
            lambda: mixer.profile(model.embedding(tokens)),
            lambda: slices.cut(tokens[:, :3]),
        ):
            try:
                attempt()
                said.append("")
            except ValueError as error:
                said.append(str(error))
    try:
        with context_parallel(groups[2]):
            said.append("")
    except ValueError as error:
        said.append(str(error))
    return said


def outside(groups: Groups) -> list[bool]:
    """Whether a scan is that of the whole: before, in a group of one, in another thread, after, and after an error."""
    decay, drive = torch.rand(2, 1, 5, 2, generator=torch.Generator().manual_seed(0))
    expected = linear_reference.forward(decay, drive, None, False)

    def is_whole() -> bool:
        return torch.equal(linear_scan(decay, drive), expected)

    found = [is_whole()]
    if dist.get_rank() == 0:
        with context_parallel(groups[1]):
            found.append(is_whole())
    with context_parallel(), ThreadPoolExecutor(1) as thread:
        found.append(thread.submit(is_whole).result())
    found.append(is_whole())
    with suppress(RuntimeError), context_parallel():
        raise RuntimeError
    return [*found, is_whole()]


def scan_compiled(here: Slice, shape, dtype, seed) -> Result:
    """As `scan_linearly`, by a function compiled for the whole before."""
    compiled = torch.compile(linear_scan, fullgraph=True, backend="eager")
    compiled(torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    return scan_linearly(here, shape, dtype, seed, scan=compiled)
