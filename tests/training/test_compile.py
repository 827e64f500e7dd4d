"""The compile option: every mixer as it is, at every length with the code made for the first, under the same names."""

import shutil
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import instantiate_module
from torch import nn

from fprnn_lightning import mixers  # noqa: F401 (their names are found in it)
from fprnn_lightning.callbacks.nonfinite_guard import first_nonfinite
from fprnn_lightning.training import ProgressiveLengths, SequenceLearner

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "mixer").glob("*.yaml"))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cases(fast: set[str]) -> pytest.MarkDecorator:
    """Every mixer in both precisions; but for the named ones, such as fp_rnn-float32, they are slow."""
    each = {f"{config.stem}-{name}": (config, dtype) for name, dtype in DTYPES.items() for config in CONFIGS}
    slow = pytest.mark.slow
    cases = [pytest.param(*case, id=name, marks=[] if name in fast else slow) for name, case in each.items()]
    return pytest.mark.parametrize(("config", "dtype"), cases)


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles without making machine code: what is found out of the model is the same, in seconds."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))


def learners(config: Path) -> tuple[SequenceLearner, SequenceLearner]:
    """The same learner, as it is and compiled."""
    made = []
    for compile in (False, True):
        torch.manual_seed(0)
        options = yaml.safe_load(config.read_text())["model"]
        curriculum = {"class_path": "FixedLength"}
        options |= {"vocab_size": 7, "width": 16, "curriculum": curriculum, "compile": compile}
        made.append(instantiate_module(SequenceLearner, options))
    return made[0], made[1]


def agree(eager: SequenceLearner, compiled: SequenceLearner, length: int, dtype: torch.dtype) -> None:
    """Asserts that both say the same of sequences, with the same gradients where they are trained."""
    tokens = torch.randint(0, 7, (4, length), generator=torch.Generator().manual_seed(length))
    found = []
    for learner in (eager, compiled):
        learner.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = learner(tokens)
        if learner.training:
            logits.float().square().mean().backward()
        gradients = {name: part.grad for name, part in learner.named_parameters() if part.grad is not None}
        found.append((logits.detach().float(), gradients))
    (logits, gradients), (compiled_logits, compiled_gradients) = found
    error = 1e-4 if dtype == torch.float32 else 0.1
    assert (compiled_logits - logits).norm() <= error * logits.norm()
    assert gradients.keys() == compiled_gradients.keys()
    for name, gradient in gradients.items():
        difference = (compiled_gradients[name] - gradient).norm()
        assert difference <= error * gradient.norm() + 1e-3 * error, name


def runs_at_every_length(config: Path, dtype: torch.dtype) -> None:
    eager, compiled = learners(config)
    agree(eager.train(), compiled.train(), 3, dtype)
    with torch.no_grad():
        agree(eager.eval(), compiled.eval(), 5, dtype)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (4, 5, 16):
            agree(eager.train(), compiled.train(), length, dtype)
        with torch.no_grad():
            agree(eager.eval(), compiled.eval(), 20, dtype)


@cases({"dense-float32", "fp_mamba_h-float32", "mamba-float32", "gated_diagonal-bfloat16"})
def test_a_mixer_is_traced_once_for_all_lengths(config: Path, dtype: torch.dtype, traced_only: None) -> None:
    runs_at_every_length(config, dtype)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="machine code is made by a C++ compiler")
@cases({"gated_diagonal-float32"})
def test_a_mixer_is_compiled_once_for_all_lengths(config: Path, dtype: torch.dtype) -> None:
    runs_at_every_length(config, dtype)


def test_weights_have_the_same_names_and_load_both_ways(small_learner, traced_only: None) -> None:
    plain, compiled = small_learner(), small_learner(compile=True)
    assert list(plain.state_dict()) == list(compiled.state_dict())
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in compiled.named_modules()]
    compiled.load_state_dict(plain.state_dict())
    plain.load_state_dict(compiled.state_dict())


def test_a_compiled_run_is_resumed_as_it_is(small_learner, small_task, small_trainer, traced_only, tmp_path) -> None:
    def fit(max_steps, ckpt_path=None, compile=True):
        learner = small_learner(compile=compile, curriculum=ProgressiveLengths(2, 8, threshold=0.1, smoothing=0.5))
        trainer = small_trainer(max_steps=max_steps)
        trainer.fit(learner, small_task(), ckpt_path=ckpt_path, weights_only=True)
        trainer.save_checkpoint(tmp_path / f"{max_steps}.ckpt")
        trainer.test(learner, small_task(), verbose=False)
        return learner

    whole = fit(6)
    fit(3)
    for compile in (True, False):
        resumed = fit(6, tmp_path / "3.ckpt", compile)
        torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=1e-5, atol=1e-6)


def test_where_a_number_is_not_finite_is_found_in_a_compiled_model(small_learner, traced_only: None) -> None:
    learner = small_learner(compile=True)
    learner(torch.zeros(2, 3, dtype=torch.long))
    learner.model.blocks[0].norm.register_forward_hook(lambda module, inputs, output: output / 0)
    assert first_nonfinite(learner, torch.zeros(2, 3, dtype=torch.long)) == "output of model.blocks.0.norm"
