"""The model: one token at a time equals in parallel, layers own their weights, generation is greedy."""

import pytest
import torch

from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.lstm import LSTMMixer
from fprnn_lightning.model import SequenceModel


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
