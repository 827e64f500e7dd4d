"""Scans, mixers and models over slices of time on several ranks give what one rank gives on the whole."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from slice_ranks import Ranks
from slice_work import (
    Slice,
    count,
    count_mixer,
    count_scan,
    joined,
    learn,
    learn_in_parallel,
    mix,
    mix_nan,
    new_model,
    on_slices,
    outside,
    refused,
    scan_compiled,
    scan_linearly,
    scan_selectively,
)
from tolerances import assert_as_accurate
from torch.nn.functional import cross_entropy

from fprnn_lightning.channel_mixers import ChannelMixer
from fprnn_lightning.cores.gated_diagonal import GatedDiagonal
from fprnn_lightning.cores.selective_ssm import SelectiveSSM
from fprnn_lightning.cores.state_space_dual import StateSpaceDual
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.diagonal import DiagonalMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.lstm import LSTMMixer
from fprnn_lightning.model import SequenceModel
from fprnn_lightning.scan import context_parallel
from fprnn_lightning.solvers import Stopping
from fprnn_lightning.solvers.anderson import Anderson
from fprnn_lightning.solvers.caps import SequenceLength
from fprnn_lightning.solvers.gradients import Implicit, OneStep, Unrolled

WIDTH = 4
CORES = {
    "FP-RNN": GatedDiagonal,
    "FP-Mamba": partial(SelectiveSSM, states=3),
    "FP-Mamba-2": partial(StateSpaceDual, states=3, head_channels=4),
}
every_core = pytest.mark.parametrize("core", CORES.values(), ids=CORES)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[Ranks]:
    processes = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.close()


def lengths_of(time: int, slices: int, generator: np.random.Generator) -> list[int]:
    """Random lengths of slices, each at least 1."""
    cuts = np.sort(generator.choice(np.arange(1, time), slices - 1, replace=False))
    return np.diff([0, *cuts, time]).tolist()


def check(ranks: Ranks, work, lengths: Sequence[int], shape, dtype, seed, **options) -> None:
    """Compares what slices give with the float64 reference on the whole."""
    actual = joined(ranks.run(on_slices_with, work, lengths, shape, dtype, seed, options))
    one, reference = Slice([shape[1]], 0), options | {"backend": "reference"}
    double = torch.complex128 if dtype.is_complex else torch.double
    alone = scan_selectively if work is scan_selectively else scan_linearly
    own, exact = (joined([alone(one, shape, kind, seed, **reference)]) for kind in (dtype, double))
    for name in exact:
        about = f"{name} of slices {lengths}"
        if dtype == torch.double:  # in which the reference is no more exact than what is tested
            torch.testing.assert_close(actual[name], exact[name], rtol=1e-12, atol=1e-13, msg=about)
        else:
            assert_as_accurate(about, actual[name], own[name], exact[name])


def on_slices_with(groups, work, lengths, shape, dtype, seed, options):
    return on_slices(groups, lambda here: work(here, shape, dtype, seed, **options), lengths)


every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@every_dtype
@pytest.mark.parametrize("seed", range(8))
def test_the_linear_scan_of_slices_is_that_of_the_whole(ranks, seed, dtype):
    generator = np.random.default_rng(seed)
    for slices in (2, 3, 4):
        B, D = generator.integers(1, 6, 2).tolist()
        time = int(generator.integers(slices, 70))
        options = dict(zip(("initial", "reverse", "strided"), generator.random(3) < 0.5, strict=True))
        check(ranks, scan_linearly, lengths_of(time, slices, generator), (B, time, D), dtype, seed, **options)


@every_dtype
@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_selective_scan_of_slices_is_that_of_the_whole(ranks, seed, dtype, dual):
    generator = np.random.default_rng(seed)
    for slices in (2, 3, 4):
        B, H, P, N = generator.integers(1, 6, 4).tolist()
        time = int(generator.integers(slices, 90))
        options = dict(zip(("options", "strided"), generator.random(2) < 0.5, strict=True)) | {"dual": dual}
        lengths = lengths_of(time, slices, generator)
        check(ranks, scan_selectively, lengths, (B, time, H, P, N), dtype, seed, **options)


@pytest.mark.parametrize("reverse", [False, True])
def test_slices_of_one_token(ranks, reverse):
    check(ranks, scan_linearly, [1, 1, 1, 1], (2, 4, 3), torch.float32, 0, reverse=reverse)
    check(ranks, scan_selectively, [1, 1, 1, 1], (2, 4, 3, 2, 5), torch.float32, 0, dual=reverse)


@pytest.mark.parametrize("reverse", [False, True])
def test_complex_numbers(ranks, reverse):
    check(ranks, scan_linearly, [3, 2, 1, 5], (2, 11, 3), torch.complex64, 0, reverse=reverse)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_other_backends(ranks, backend):
    check(ranks, scan_linearly, [3, 1, 2], (1, 6, 3), torch.float32, 0, backend=backend)
    check(ranks, scan_selectively, [1, 2], (1, 3, 2, 3, 2), torch.float32, 0, backend=backend, dual=True)


def check_mixer(ranks: Ranks, make, lengths: Sequence[int], batch: int = 3, **options) -> tuple[dict, list[dict]]:
    """Compares a mixer on slices with the mixer on the whole; what it tells of itself there, and on each slice."""
    shape = batch, sum(lengths), WIDTH
    results = [each for each in ranks.run(on_slices_with_options, lengths, make, shape, options) if each is not None]
    actual = joined([result for result, _ in results])
    exact, report = mix(Slice([shape[1]], 0), make, shape, **options)
    for name, value in joined([exact]).items():
        torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-11, msg=name)
    return report, [told for _, told in results]


def on_slices_with_options(groups, lengths, make, shape, options):
    return on_slices(groups, lambda here: mix(here, make, shape, **options), lengths)


def iterating(iterations: int, tolerance: float = 0.0, **options) -> partial:
    """A fixed-point mixer with so many iterations at most."""
    caps = {"train_iterations": iterations, "evaluation_iterations": iterations}
    gradient = {"gradient": Implicit(iterations, tolerance)}
    return partial(FixedPointMixer, **caps | gradient | {"stopping": Stopping(tolerance, 1.0)} | options)


@every_core
@pytest.mark.parametrize("lengths", [[7, 4], [1, 2, 5, 1]], ids=str)
@pytest.mark.parametrize("convolution", [0, 4])
def test_diagonal_mixers(ranks, core, lengths, convolution):
    check_mixer(ranks, partial(DiagonalMixer, core=core, convolution=convolution), lengths)


@every_core
@pytest.mark.parametrize("lengths", [[7, 4], [1, 2, 5, 1]], ids=str)
@pytest.mark.parametrize("gradient", [Implicit(5, 0.0), OneStep(), Unrolled()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("training", [True, False])
def test_so_many_iterations(ranks, core, lengths, gradient, training):
    check_mixer(ranks, iterating(5, core=core, gradient=gradient, convolution=3), lengths, training=training)


@every_core
@pytest.mark.parametrize("lengths", [[7, 4], [1, 2, 5, 1]], ids=str)
def test_converged_iterations(ranks, core, lengths):
    report, told = check_mixer(ranks, iterating(300, 1e-13, core=core), lengths)
    assert all(report["converged"]) and report["iterations"].max() < 300
    for each in told:
        assert each.keys() == report.keys()


@pytest.mark.parametrize("channel_mixer", ChannelMixer.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_channel_mixer(ranks, channel_mixer):
    check_mixer(ranks, iterating(4, channel_mixer=channel_mixer), [3, 2, 4])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("window", [1, 4])
def test_anderson(ranks, training, window):
    check_mixer(ranks, iterating(9, solver=Anderson(window)), [4, 1, 5, 2], training=training)


@pytest.mark.parametrize(("core", "tolerance"), [(CORES["FP-RNN"], 0.03), (CORES["FP-Mamba"], 0.005)])
def test_training_stops_for_the_whole_sequences(ranks, core, tolerance):
    make = iterating(40, tolerance, core=core, stopping=Stopping(tolerance, 0.5))
    report, told = check_mixer(ranks, make, [9, 4, 12], batch=6)
    assert 1 < report["iterations"].max() < 40 and 0 < report["converged"].mean() < 1, "else it says little"
    for each in told:
        for name, value in report.items():
            torch.testing.assert_close(each[name], value)


@pytest.mark.parametrize("iterations", [3, 40])
def test_evaluation_stops_for_each_prefix(ranks, iterations):
    make = iterating(iterations, 0.03)
    report, told = check_mixer(ranks, make, [9, 4, 12, 1], batch=6, training=False)
    assert len(report["iterations"].unique()) > 1 or iterations == 3, "else it says little"
    for name in ("iterations", "residual", "converged"):
        torch.testing.assert_close(told[-1][name], report[name])
    assert (told[0]["iterations"] <= told[-1]["iterations"]).all()


def test_as_many_iterations_as_tokens_of_the_whole(ranks):
    make = iterating(1, train_iterations=SequenceLength(2), gradient=OneStep())
    report, told = check_mixer(ranks, make, [1, 4, 2])
    assert (report["iterations"] == 7).all() and (told[0]["iterations"] == 7).all()


def test_warm_starts(ranks):
    check_mixer(ranks, iterating(3, warm_start=True), [3, 4], loops=2)


@pytest.mark.parametrize("recompute", [False, True])  # in backward, which is outside of context_parallel
@pytest.mark.parametrize("core", [CORES["FP-RNN"], CORES["FP-Mamba"]])
def test_a_model_learns_the_same(ranks, core, recompute):
    mixer, options = iterating(6, core=core, convolution=4), {"layers": 2, "mlp_ratio": 2, "recompute": recompute}
    make = partial(SequenceModel, 7, mixer, 8, **options)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(7, (2, 3, 14), generator=generator)
    targets[:, :4] = -100  # nothing is scored in the first slice
    results = ranks.run(learn, make, tokens, targets)
    model = new_model(make)
    logits = model(tokens)
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    torch.testing.assert_close(torch.cat([result[0] for result in results], 1), logits.detach())
    for _, gradients, total in results:
        torch.testing.assert_close(total, loss.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_slices_and_parts_of_a_batch_with_ddp(ranks):
    make = partial(SequenceModel, 7, iterating(4, convolution=4), 8, layers=2)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(7, (2, 4, 9), generator=generator)
    results = ranks.run(learn_in_parallel, make, tokens, targets)
    model = new_model(make)
    logits = model(tokens)
    cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    halves = [torch.cat([results[first + rank][0] for rank in (0, 1)], 1) for first in (0, 2)]
    torch.testing.assert_close(torch.cat(halves), logits.detach())
    for _, gradients in results:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


@every_dtype
@pytest.mark.parametrize("slices", [2, 3])
def test_one_exchange_in_each_direction_of_a_scan(ranks, slices, dtype):
    B, D, N, size = 2, 3, 5, dtype.itemsize
    for selective, forward, backward in ((False, 2 * D, D), (True, N * D + D, N * D)):
        counted = ranks.run(count, [7] * slices, count_scan, (B, 7, D), dtype, selective)
        expected = [("gather", B * forward * size), "backward", ("gather", B * backward * size)]
        assert counted == [expected] * slices + [[]] * (4 - slices)


def test_exchanges_of_an_iteration(ranks):
    B, D, iterations = 2, 8, 5
    make = iterating(iterations)
    first, last, *_ = ranks.run(count, [3, 3], count_mixer, make, (B, 3, D // 2), True)
    tokens, state, two_numbers = ("gather", 8), ("gather", 4 * B * 2 * D), ("gather", 4 * B * 2)
    adjoint, token = ("gather", 4 * B * D), ("send", 4 * B * D)
    # the iterations without gradient, that with it, and the state before for the output gate; all of that back again
    assert first == [
        *(tokens, *[token, state, two_numbers] * (iterations - 1), token, state, token),
        *("backward", *[adjoint, two_numbers] * iterations, adjoint),
    ]
    assert last == [
        *(tokens, *[state, two_numbers] * (iterations - 1), state),
        *("backward", token, *[adjoint, token, two_numbers] * iterations, adjoint, token),
    ]


def test_a_nan_stops_no_rank_alone(ranks):
    told = ranks.run(on_slices, mix_nan, [3, 3, 2], iterating(7, 1e-3), WIDTH)[:3]
    assert told[0]["converged"].tolist() == [True, False] or told[0]["iterations"].tolist() == [7, 7]
    for each in told:
        for name, value in told[0].items():
            torch.testing.assert_close(each[name], value, equal_nan=True)


@pytest.mark.parametrize("mixer", [DenseMixer, LSTMMixer, DiagonalMixer])
def test_what_cannot_be_cut_is_refused(ranks, mixer):
    whole, prefill, profile, few, *other = ranks.run(refused, partial(SequenceModel, 3, mixer, 4))[3]
    sentence = f"{mixer.__name__} needs whole sequences: it cannot run within context_parallel"
    assert whole == ("" if mixer is DiagonalMixer else sentence)
    assert prefill.endswith("needs whole sequences: it cannot run within context_parallel")
    assert profile == ("" if mixer is LSTMMixer else sentence.replace(" needs", ".profile needs"))
    assert few == "a sequence of 3 tokens cannot be cut into 4 slices of at least one"
    assert other == ["context_parallel: rank 3 is not in the group that it was given"]


def test_a_process_group_is_needed():
    with pytest.raises(ValueError, match="needs a process group: call"), context_parallel():
        pass


def test_it_holds_within_only(ranks):
    for found in ranks.run(outside):
        assert all(found)


def test_a_compiled_scan_is_one_of_slices_within(ranks):
    check(ranks, scan_compiled, [3, 2], (1, 5, 2), torch.float32, 0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_slices_on_gpus(tmp_path):
    ranks = Ranks(min(4, torch.cuda.device_count()), tmp_path, "nccl")
    lengths = [70, 1, 33, 20][: ranks.size]
    check(ranks, scan_linearly, lengths, (2, sum(lengths), 5), torch.float32, 0)
    check(ranks, scan_selectively, lengths, (2, sum(lengths), 3, 2, 4), torch.float32, 0, dual=True)
    for core in CORES.values():
        check_mixer(ranks, iterating(4, core=core, convolution=4), lengths)
        check_mixer(ranks, iterating(40, 0.03, core=core), lengths, training=False)
    ranks.close()
