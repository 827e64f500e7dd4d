"""How the fixed-point mixer iterates: solvers, caps, starts, memory, and what it says of itself."""

from pathlib import Path

import pytest
import torch
import yaml

from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.cli import CommandLine, main
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.solvers import Stopping
from fprnn_lightning.solvers.anderson import Anderson
from fprnn_lightning.solvers.caps import RandomCap, SequenceLength
from fprnn_lightning.solvers.gradients import Implicit, OneStep, Unrolled
from fprnn_lightning.solvers.picard import Picard

WIDTH, TIME = 6, 9
NEVER = Stopping(0.0)


class Expansive(Householder):
    """I - Q five times too large."""

    def residual_apply(self, q, v):
        return 5 * super().residual_apply(q, v)


def _mixer(**options) -> FixedPointMixer:
    torch.manual_seed(0)
    return FixedPointMixer(WIDTH, **options).double()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(3, TIME, WIDTH, dtype=torch.double)


def _iterations(mixer, x):
    mixer(x)
    return mixer.diagnostics()["iterations"].unique().tolist()


@pytest.mark.parametrize("gradient", [Unrolled(), Implicit(300, 1e-14)], ids=str)
def test_anderson_finds_the_dense_mixer_too(gradient, x):
    dense = DenseMixer(WIDTH).double()
    mixer = _mixer(solver=Anderson(), stopping=Stopping(1e-13, 1.0), train_iterations=300, gradient=gradient)
    mixer.load_state_dict(dense.state_dict())
    found, exact = [], []
    for each, gradients in ((mixer, found), (dense, exact)):
        y = each(x)
        gradients += [y, *torch.autograd.grad(y.sin().sum(), list(each.parameters()))]
    precision = 1e-8 if isinstance(gradient, Implicit) else 1e-3
    torch.testing.assert_close(found[0], exact[0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found[1:], exact[1:], rtol=precision, atol=precision)


@pytest.mark.parametrize("iterations", [2, 7, 100])
def test_accelerated_outputs_do_not_depend_on_later_tokens_or_the_batch(iterations):
    """Nor does it matter that others stop earlier: sequences of different difficulty, a coarse tolerance."""
    torch.manual_seed(0)
    mixer = FixedPointMixer(16, solver=Anderson(3), stopping=Stopping(0.05), evaluation_iterations=iterations)
    mixer.double().eval()
    with torch.no_grad():
        mixer.terms.from_feedback.weight *= 2
        x = torch.randn(8, 24, 16, dtype=torch.double) * torch.logspace(-1, 1, 8, dtype=torch.double)[:, None, None]
        whole = mixer(x)
        assert len(mixer.diagnostics()["iterations"].unique()) > 1 or iterations < 100
        torch.testing.assert_close(mixer(x[:, :11]), whole[:, :11], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(mixer(x[3:5]), whole[3:5], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("solver", [Picard(), Anderson()], ids=str)
def test_step_repeated_is_the_accelerated_forward(solver, x):
    mixer = _mixer(solver=solver, stopping=Stopping(1e-12, 1.0), evaluation_iterations=SequenceLength(300)).eval()
    state, outputs = mixer.initial_state(3), []
    for x_t in x.unbind(1):
        y_t, state = mixer.step(x_t, state)
        outputs.append(y_t)
    torch.testing.assert_close(torch.stack(outputs, 1), mixer(x), rtol=1e-8, atol=1e-8)


def test_caps_hold_in_both_modes(x):
    mixer = _mixer(stopping=NEVER, train_iterations=5, evaluation_iterations=7)
    assert (_iterations(mixer, x), _iterations(mixer.eval(), x)) == ([5], [7])
    with torch.no_grad():
        assert (_iterations(mixer.train(), x), _iterations(mixer.eval(), x)) == ([5], [7])


def test_a_cap_may_be_the_length_of_the_sequence(x):
    mixer = _mixer(stopping=NEVER, train_iterations=SequenceLength(4), evaluation_iterations=SequenceLength(6))
    assert [_iterations(mixer, x[:, :time]) for time in (2, TIME)] == [[4], [TIME]]
    assert [_iterations(mixer.eval(), x[:, :time]) for time in (2, TIME)] == [[6], [TIME]]


def test_a_random_cap_is_drawn_for_every_training_batch_alike_in_every_layer(x):
    cap = RandomCap(mean=6, seed=3)
    layers = [_mixer(stopping=NEVER, train_iterations=cap, evaluation_iterations=2) for _ in range(2)]
    expected = [[cap.iterations(TIME, draw)] for draw in range(8)]
    drawn = []
    for _ in range(8):
        drawn += [iterations := _iterations(layers[0], x)]
        assert _iterations(layers[1], x) == iterations
        assert _iterations(layers[0].eval(), x) == [2]
        layers[0].step(x[:, 0], layers[0].initial_state(3))
        layers[0].train()
    assert drawn == expected and len({number for (number,) in drawn}) > 2
    resumed = _mixer(stopping=NEVER, train_iterations=cap)
    resumed.load_state_dict(layers[0].state_dict())
    assert _iterations(resumed, x) == _iterations(layers[0], x) == [cap.iterations(TIME, 8)]


def test_accumulated_batches_share_a_draw_and_a_repetition_repeats_it(x):
    cap = RandomCap(mean=6, seed=3)
    mixer = _mixer(stopping=NEVER, train_iterations=cap)
    for draw in range(4):
        expected = [cap.iterations(TIME, draw)]
        assert _iterations(mixer, x) == expected
        for _ in range(2):
            mixer.go_on_with_step()
            again = mixer.repeatable()
            assert _iterations(mixer, x) == expected
            with again():
                assert _iterations(mixer, x) == expected
    assert mixer.state_dict()["draws._extra_state"] == 4
    fixed = _mixer(stopping=NEVER, train_iterations=5)
    fixed.go_on_with_step()
    assert _iterations(fixed, x) == [5]


def test_only_a_random_cap_adds_to_a_checkpoint():
    dense = DenseMixer(WIDTH).state_dict().keys()
    assert _mixer(train_iterations=SequenceLength(), warm_start=True).state_dict().keys() == dense
    assert _mixer(train_iterations=RandomCap()).state_dict().keys() - dense == {"draws._extra_state"}


def test_mistaken_caps_are_refused():
    with pytest.raises(ValueError, match="evaluation_iterations is a RandomCap, which is for training only"):
        _mixer(evaluation_iterations=RandomCap())
    for mode in ("train", "evaluation"):
        with pytest.raises(ValueError, match=f"{mode}_iterations is 0, must be at least 1"):
            _mixer(**{f"{mode}_iterations": 0})


def test_a_warm_start_goes_on_from_the_previous_batch_in_training_only(x):
    options = {"stopping": Stopping(1e-9, 1.0), "train_iterations": 300, "evaluation_iterations": 300}
    cold, warm = (_mixer(warm_start=warm_start, **options) for warm_start in (False, True))
    exact = cold(x)
    (first,), (again,), (warmed,) = _iterations(warm, x), _iterations(cold, x), _iterations(warm, x)
    assert first == again and warmed <= 2  # the last, and that which Implicit records
    torch.testing.assert_close(warm(x), exact, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(warm(x + 0.1), cold(x + 0.1), rtol=1e-7, atol=1e-7)
    for each in (x[:2], x[:, :5]):  # of another shape
        assert torch.equal(warm(each), cold(each))
    warm(x)
    assert torch.equal(warm.eval()(x), cold.eval()(x))


def test_a_warm_start_forgets_what_is_not_finite(x):
    cold, warm = (_mixer(warm_start=warm_start) for warm_start in (False, True))
    for bad in (torch.nan, torch.inf):
        warm(torch.full_like(x, bad))
        assert torch.equal(warm(x), cold(x))


def test_a_warm_start_carries_no_gradient(x):
    mixer = _mixer(warm_start=True, gradient=Unrolled())
    for _ in range(2):
        mixer(x).sum().backward()


@pytest.mark.parametrize("solver", [Picard(), Anderson()], ids=str)
def test_memory_does_not_grow_with_the_iterations_unless_they_are_unrolled(solver, x):
    def saved(gradient, iterations):
        def pack(tensor):
            kept.append(tensor)  # a storage that is freed could come back as another's
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        kept, storages = [], {}
        mixer = _mixer(solver=solver, stopping=NEVER, train_iterations=iterations, gradient=gradient)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            mixer(x)
        return sum(storages.values())

    for gradient in (OneStep(), Implicit()):
        once = saved(gradient, 2)
        assert once > 0 and saved(gradient, 8) == saved(gradient, 32) == once
    assert 2 * saved(Unrolled(), 2) < saved(Unrolled(), 8) < saved(Unrolled(), 32) / 3


def test_diagnostics_hold_no_more_memory_than_they_tell(x):
    mixer = _mixer().eval()
    mixer(x)
    for part in mixer.diagnostics().values():
        assert part.untyped_storage().nbytes() == part.nbytes


def test_diagnostics_tell_of_the_gradient_after_backward(x):
    mixer = _mixer(gradient=Implicit(50, 1e-6))
    y = mixer(x)
    assert mixer.diagnostics().keys() == {"iterations", "residual", "converged"}
    y.sum().backward()
    report = mixer.diagnostics()
    assert report["adjoint_converged"].all() and report["adjoint_residual"].max() < 1e-6
    assert report["adjoint_iterations"].shape == (3,) and 2 < report["adjoint_iterations"].max() <= 50
    y = mixer(x)
    mixer.eval()(x)
    y.sum().backward()
    assert mixer.diagnostics().keys() == {"iterations", "residual", "converged"}  # of the last forward
    mixer.train()
    mixer.gradient = OneStep()
    mixer(x).sum().backward()
    assert mixer.diagnostics().keys() == {"iterations", "residual", "converged"}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("solver", [Picard(), Anderson()], ids=str)
def test_an_expansive_mixer_says_that_it_has_not_converged(solver, training, x):
    mixer = _mixer(channel_mixer=Expansive, solver=solver, train_iterations=20, evaluation_iterations=20)
    mixer.train(training)(x)
    assert not mixer.diagnostics()["converged"].any() and (mixer.diagnostics()["residual"] > 0.01).all()


SMALL = {
    "data": {
        "class_path": "WordProblem",
        "init_args": {
            "group": "S3",
            "batch_size": 4,
            "train_length": 4,
            "validation_lengths": [4],
            "test_lengths": [4],
            "validation_sequences": 4,
            "test_sequences": 4,
        },
    },
    "model": {
        "mixer": {"class_path": "FixedPointMixer", "init_args": {"expand": 1}},
        "width": 8,
        "curriculum": {"class_path": "FixedLength", "init_args": {"length": 4}},
        "schedule": {"class_path": "WarmupConstant", "init_args": {"warmup_steps": 1}},
    },
    "trainer": {
        "max_steps": 4,
        "val_check_interval": 2,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "default_root_dir": "root",
    },
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump(SMALL))
    return ["--config", "small.yaml"]


def _built(small, *options) -> FixedPointMixer:
    line = CommandLine(["fit", *small, "--trainer.max_steps", "1", *options])
    return line.model.model.blocks[0].mixer


def test_every_choice_is_one_short_name_on_the_command_line(small):
    choices = {"gradient": "OneStep", "solver": "Anderson", "train_iterations": "RandomCap", "train_iterations.mean": 6}
    mixer = _built(small, *(f"--model.mixer.{name}={value}" for name, value in choices.items()))
    assert (mixer.gradient, mixer.solver, mixer.train_iterations) == (OneStep(), Anderson(), RandomCap(mean=6))


def test_every_choice_is_one_key_of_a_config(small):
    Path("choices.yaml").write_text(
        "model: {mixer: {class_path: FixedPointMixer, init_args: {gradient: {class_path: Unrolled}, "
        "train_iterations: {class_path: RandomCap, init_args: {shape: 2}}, "
        "evaluation_iterations: {class_path: SequenceLength}}}}\n"
    )
    mixer = _built(small, "--config", "choices.yaml")
    assert (mixer.gradient, mixer.train_iterations) == (Unrolled(), RandomCap(shape=2))
    assert mixer.evaluation_iterations == SequenceLength()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["train_iterations", "RandmCap"], "train_iterations: unknown class RandmCap, nearest known: RandomCap"),
        (["train_iterations", "0"], "train_iterations is 0, must be at least 1"),
        (["train_iterations", "2.5"], "train_iterations: expected int, got 2.5"),
        (["train_iterations", "{class_path: RandomCap, init_args: {mean: 0}}"], "RandomCap: mean 0 and shape 4 must"),
        (["evaluation_iterations", "RandomCap"], "evaluation_iterations is a RandomCap, which is for training only"),
        (["solver", "{class_path: Anderson, init_args: {window: 0}}"], "Anderson: window is 0, must be at least 1"),
        (["gradient", "OnStep"], "gradient: unknown class OnStep, nearest known: OneStep"),
    ],
    ids=str,
)
def test_a_mistaken_choice_is_told_in_one_sentence(small, capsys, options, sentence):
    name, value = options
    assert main(["fit", *small, f"--model.mixer.{name}", value]) == 2
    *_, told = capsys.readouterr().err.splitlines()
    assert told.startswith("error: ") and sentence in told and len(told) < 300


def test_a_resumed_fit_draws_the_caps_that_it_would_have_drawn(small):
    options = [*small, "--model.mixer.train_iterations", "RandomCap", "--model.mixer.gradient", "OneStep"]
    assert main(["fit", *options]) == 0
    longer = [*options, "--trainer.max_steps", "8"]
    assert main(["fit", *longer]) == 0
    assert main(["fit", *longer, "--ckpt_path", "root/s3/fixed_point/run_0/last.ckpt"]) == 0
    straight, resumed = (torch.load(f"root/s3/fixed_point/run_{n}/last.ckpt")["state_dict"] for n in (1, 2))
    assert straight["model.blocks.0.mixer.draws._extra_state"] == 8
    for name, weight in straight.items():
        assert torch.equal(resumed[name], weight), name
