"""The model: one token at a time equals in parallel, layers own their weights, generation is greedy."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.lstm import LSTMMixer
from fprnn_lightning.model import SequenceModel
from fprnn_lightning.solvers.caps import RandomCap
from fprnn_lightning.solvers.gradients import Implicit, OneStep, Unrolled


@pytest.fixture(params=[LSTMMixer, DenseMixer], ids=lambda mixer: mixer.__name__)
def model(request) -> SequenceModel:
    torch.manual_seed(0)
    return SequenceModel(7, request.param, width=6, layers=2, mlp_ratio=2.0).double()


def test_logits_one_token_at_a_time_are_those_in_parallel(model):
    tokens = torch.randint(7, (3, 9))
    states, logits = model.initial_state(3), []
    for column in tokens.unbind(1):
        step, states = model.step(column, states)
        logits.append(step)
    torch.testing.assert_close(torch.stack(logits, 1), model(tokens))


def test_layers_have_weights_of_their_own(model):
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    assert len(set(pointers)) == len(pointers)


def test_generate_continues_with_the_likeliest_token(model):
    prompt = torch.randint(7, (2, 4))
    tokens = prompt
    for _ in range(5):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(prompt, 5), tokens[:, 4:])


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="width 6 and 0 layers"):
        SequenceModel(7, LSTMMixer, width=6, layers=0)
    with pytest.raises(ValueError, match=r"expand 0\.25 times width 6"):
        SequenceModel(7, LSTMMixer, width=6, mlp_ratio=0.25)


RULES = (OneStep(), Implicit(), Unrolled())
REMEMBERING = {"train_iterations": RandomCap(), "warm_start": True, "convolution": 3}


@pytest.mark.parametrize(
    "mixer", [LSTMMixer, DenseMixer, *(partial(FixedPointMixer, gradient=rule, **REMEMBERING) for rule in RULES)]
)
def test_what_is_computed_again_gives_the_same_gradients(mixer: Callable) -> None:
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = SequenceModel(7, mixer, width=6, layers=2, mlp_ratio=2.0, recompute=recompute)
        for _ in range(3):  # each starts where the one before ended
            logits = model(torch.randint(7, (4, 9)))
            logits.square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append((gradients, [block.mixer.diagnostics() for block in model.blocks], model.state_dict()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
