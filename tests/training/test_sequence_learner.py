"""The learner under a real Trainer: what is decayed, cut, logged, saved, resumed and stopped."""

import math
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from torch.nn.functional import cross_entropy

from fprnn_lightning.channel_mixers.orthogonal import Orthogonal
from fprnn_lightning.cores.selective_ssm import SelectiveSSM
from fprnn_lightning.cores.state_space_dual import StateSpaceDual
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.lstm import LSTMMixer
from fprnn_lightning.tasks import Copying
from fprnn_lightning.training import (
    FixedLength,
    LengthAccuracy,
    ProgressiveLengths,
    SequenceLearner,
    WarmupHoldCosine,
)
from fprnn_lightning.training.sequence_learner import weight_decay_groups


class Recorder(Callback):
    """Keeps, per training step, the number of tokens and what was logged."""

    def __init__(self):
        self.tokens, self.logged = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.tokens.append(outputs["tokens"])
        self.logged.append({name: value.item() for name, value in trainer.callback_metrics.items()})


@pytest.mark.parametrize("core", [SelectiveSSM, partial(StateSpaceDual, head_channels=16)])
def test_what_is_exempt_from_weight_decay_in_a_selective_fixed_point(core):
    mixer = FixedPointMixer(16, core=core, channel_mixer=Orthogonal, convolution=4)
    exempt = {id(parameter) for parameter in weight_decay_groups(mixer, 0.1)[1]["params"]}
    assert {name for name, parameter in mixer.named_parameters() if id(parameter) in exempt} == {
        "core.A_log", "core.D", "core.dt_bias", "channel_mixer.weight", "convolution.filters.bias",
        "terms.from_input.bias",
    }  # fmt: skip


def test_weight_decay_groups(small_learner):
    learner = small_learner()
    learner.model.blocks[0].mixer.output_projection.weight.no_weight_decay = True
    names = {id(parameter): name for name, parameter in learner.model.named_parameters()}
    decayed, exempt = weight_decay_groups(learner.model, 0.1)
    assert [group["weight_decay"] for group in (decayed, exempt)] == [0.1, 0.0]
    assert sorted(names[id(parameter)] for parameter in decayed["params"]) == [
        "blocks.0.mixer.lstm.weight_hh_l0",
        "blocks.0.mixer.lstm.weight_ih_l0",
        "head.weight",
    ]
    assert sorted(names[id(parameter)] for parameter in exempt["params"]) == [
        "blocks.0.mixer.lstm.bias_hh_l0",
        "blocks.0.mixer.lstm.bias_ih_l0",
        "blocks.0.mixer.output_projection.weight",
        "blocks.0.norm.weight",
        "embedding.weight",
        "head.bias",
        "norm.weight",
    ]


def test_training_batches_are_cut_and_logged(small_learner, small_task, small_trainer):
    recorder, curriculum = Recorder(), ProgressiveLengths(2, 4, threshold=0.01, smoothing=0.0)
    learner = small_learner(curriculum=curriculum)
    small_trainer(callbacks=[recorder]).fit(learner, small_task())
    assert recorder.tokens == [16 * 2, 16 * 3, 16 * 4, 16 * 4]
    assert curriculum.length(4) == 2, "the learner moves its own copy"
    last = recorder.logged[-1]
    assert last["train/length"] == 4
    assert last["train/learning_rate"] == pytest.approx(2e-3)
    assert {"train/loss", "train/token_accuracy", "train/last_token_accuracy"} <= last.keys()
    assert recorder.logged[0]["train/learning_rate"] == pytest.approx(1e-3)


@pytest.mark.parametrize("labels", ["every", "last"])
def test_labels_learnt_from_cut_batches(small_learner, small_task, small_trainer, labels):
    losses = []

    class Losses(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append(outputs["loss"].item())

    task = small_task(least_length=2, pairs=0.25)
    learner = small_learner(curriculum=FixedLength(5), labels=labels, learning_rate=0.0)
    small_trainer(callbacks=[Losses()]).fit(learner, task)
    assert len(losses) > 1
    for index, loss in enumerate(losses):
        tokens, targets = (part[:, :5] for part in task.batch("train", index))
        scores = learner(tokens).log_softmax(-1).tolist()
        expected = []
        for row, labelled in zip(scores, targets.tolist(), strict=True):
            own = [-row[t][label] for t, label in enumerate(labelled) if label != -100]
            expected += own[-1:] if labels == "last" else own
        assert loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_a_curriculum_beyond_the_training_sequences_is_refused(small_learner, small_task, small_trainer):
    learner = small_learner(curriculum=FixedLength(9))
    with pytest.raises(ValueError, match="ends at length 9, but the training sequences have 8 tokens"):
        small_trainer().fit(learner, small_task())


@pytest.mark.parametrize(("accumulated", "logged_every"), [(1, 1), (2, 1), (1, 4)])
def test_training_stops_when_the_schedule_ends(small_learner, small_task, small_trainer, accumulated, logged_every):
    recorder = Recorder()
    learner = small_learner(
        curriculum=ProgressiveLengths(2, 4, threshold=0.01, smoothing=0.0), schedule=WarmupHoldCosine(1, 4)
    )
    trainer = small_trainer(
        max_steps=100, callbacks=[recorder], accumulate_grad_batches=accumulated, log_every_n_steps=logged_every
    )
    trainer.fit(learner, small_task())
    end_step = 2  # two steps, of however many batches
    assert trainer.global_step == end_step + 4
    factors = [1] * end_step + [1, 0.853553, 0.5, 0.146447]
    if logged_every == 1:
        rates = [logged["train/learning_rate"] / 2e-3 for logged in recorder.logged[accumulated - 1 :: accumulated]]
        assert rates == pytest.approx(factors, abs=1e-5)
    assert recorder.logged[-1]["train/learning_rate"] == pytest.approx(2e-3 * factors[-1], rel=1e-4)


def test_evaluation_measures_every_length_in_one_pass(small_learner, small_task, small_trainer):
    learner, task = small_learner(chance=0.5), small_task()
    trainer = small_trainer(limit_val_batches=1.0)
    trainer.fit(learner, task)
    validated = trainer.validate(learner, task, verbose=False)[0]
    tested = trainer.test(learner, task, verbose=False)[0]
    predicted = torch.cat(trainer.predict(learner, task))
    expected = LengthAccuracy([4, 8, 50])
    targets = torch.cat([targets for _, targets in task.test_dataloader()])
    expected.update(predicted, targets)
    values = expected.compute()
    for name in ("token_accuracy", "last_token_accuracy", "sequence_accuracy"):
        assert [tested[f"test/{name}_{length}"] for length in (4, 8, 50)] == pytest.approx(
            [value.item() for value in values[name]]
        )
        assert {f"validation/{name}_4", f"validation/{name}_8"} <= validated.keys()
    for length in (4, 8, 50):
        twice = 2 * tested[f"test/last_token_accuracy_{length}"]
        assert tested[f"test/scaled_accuracy_{length}"] == pytest.approx(twice - 1, abs=1e-6)
    assert [value.item() for value in values["sequences"]] == [24, 24, 24]
    assert validated["validation/loss"] > 0
    assert validated["validation/bits_per_label"] == pytest.approx(validated["validation/loss"] / math.log(2))
    nats = cross_entropy(learner.cpu()(torch.cat(list(task.predict_dataloader()))).flatten(0, 1), targets.flatten())
    assert tested["test/bits_per_label"] == pytest.approx(nats.item() / math.log(2), rel=1e-5)


@pytest.mark.parametrize("evaluation_batch_size", [3, 64])
def test_the_loss_of_validation_is_over_scored_positions_however_they_are_batched(
    small_learner, small_trainer, evaluation_batch_size
):
    lengths, sizes = {"validation_lengths": [1, 9], "test_lengths": [50]}, {"train_length": 20, "longest": 9}
    task = Copying(shortest=1, validation_sequences=30, evaluation_batch_size=evaluation_batch_size, **lengths, **sizes)
    learner = small_learner(vocab_size=task.vocab_size, prompt_overhead=task.prompt_overhead, **lengths)
    validated = small_trainer(limit_val_batches=1.0).validate(learner, task, verbose=False)[0]
    tokens, targets = (torch.cat(parts) for parts in zip(*task.val_dataloader(), strict=True))
    expected = cross_entropy(learner.cpu()(tokens).flatten(0, 1), targets.flatten()).item()
    assert validated["validation/loss"] == pytest.approx(expected, rel=1e-5)


def test_parity_is_learnt(small_learner, small_task, small_trainer):
    learner, task = small_learner(learning_rate=3e-2), small_task(batch_size=64)
    trainer = small_trainer(max_steps=150)
    trainer.fit(learner, task)
    assert trainer.test(learner, task, verbose=False)[0]["test/sequence_accuracy_8"] == 1.0


def test_answers_are_generated_from_their_prompts(small_learner, small_trainer):
    """Accuracies of what the model says next after what it said itself, one sequence at a time."""
    lengths = {"validation_lengths": [3], "test_lengths": [2, 4]}
    sizes = {"train_length": 12, "batch_size": 64, "test_sequences": 80, "evaluation_batch_size": 32}
    task = Copying(alphabet=3, shortest=1, longest=4, **lengths, **sizes)
    prompts = {"vocab_size": task.vocab_size, "chance": task.chance, "prompt_overhead": task.prompt_overhead}
    lengths["test_lengths"] = task.test_lengths
    learner = small_learner(curriculum=FixedLength(12), learning_rate=3e-2, width=16, **lengths, **prompts)
    trainer = small_trainer(max_steps=60)
    trainer.fit(learner, task)
    tested = trainer.test(learner, task, verbose=False)[0]
    hits = {length: [] for length in task.test_lengths}
    learner.eval()
    for tokens, targets in task.test_dataloader():
        for row, said in zip(tokens, targets, strict=True):
            answer = said[said != -100]
            read = row[: len(answer) + 2]
            for _ in answer:
                read = torch.cat([read, learner(read[None])[0, -1:].argmax(-1)])
            hits[len(answer)].append((read[len(answer) + 2 :] == answer).tolist())
    for length, rows in hits.items():
        right = [hit for row in rows for hit in row]
        assert tested[f"test/generated_token_accuracy_{length}"] == pytest.approx(sum(right) / len(right))
        assert tested[f"test/generated_sequence_accuracy_{length}"] == pytest.approx(sum(map(all, rows)) / len(rows))
        # a greedy answer is right throughout if and only if each token of it is right after the given ones
        assert tested[f"test/generated_sequence_accuracy_{length}"] == tested[f"test/sequence_accuracy_{length}"]
        scaled = (tested[f"test/last_token_accuracy_{length}"] - 1 / 3) * 3 / 2
        assert tested[f"test/scaled_accuracy_{length}"] == pytest.approx(scaled, abs=1e-6)
    given, generated = (tested[f"test/{name}_4"] for name in ("token_accuracy", "generated_token_accuracy"))
    assert 0.2 < generated < given < 1, "else it says little"
    assert tested["test/generated_sequence_accuracy_2"] > 0


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")  # the resumed run continues there
@pytest.mark.parametrize("saved_at", [3, 7])
def test_a_resumed_run_equals_the_uninterrupted_one(small_learner, small_task, small_trainer, tmp_path, saved_at):
    def fit(folder, max_steps, ckpt_path=None):
        learner = small_learner(
            curriculum=ProgressiveLengths(2, 5, threshold=0.3, smoothing=0.6), schedule=WarmupHoldCosine(3, 20)
        )
        keep = ModelCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = small_trainer(max_steps=max_steps, callbacks=[keep], enable_checkpointing=True)
        trainer.fit(learner, small_task(), ckpt_path=ckpt_path, weights_only=True)
        return torch.load(tmp_path / folder / f"step={max_steps}.ckpt", weights_only=True)

    whole = fit("whole", 12)
    fit("parts", saved_at)
    resumed = fit("parts", 12, ckpt_path=tmp_path / "parts" / f"step={saved_at}.ckpt")
    assert whole["curriculum"]["end_step"] is not None
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "curriculum"):
        torch.testing.assert_close(resumed[part], whole[part], rtol=0, atol=0)


def test_checkpoints_of_python_runs_hold_plain_types_only(small_learner, small_task, small_trainer, tmp_path):
    learner = small_learner(mixer=lambda width: LSTMMixer(width, expand=1.0))
    trainer = small_trainer()
    trainer.fit(learner, small_task())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["width"] == 8
    assert not {"mixer", "schedule", "curriculum"} & checkpoint["hyper_parameters"].keys()


def test_checkpoints_of_command_line_runs_rebuild_the_learner(small_task, small_trainer, tmp_path, monkeypatch):
    """LightningCLI stores the configuration of factories and objects: the checkpoint alone gives back the learner."""
    arguments = [
        "learn",
        "--model.mixer=fprnn_lightning.mixers.lstm.LSTMMixer",
        "--model.mixer.expand=1.0",
        "--model.vocab_size=2",
        "--model.width=8",
        "--model.schedule.decay_steps=7",
        "--model.curriculum.end=8",
    ]
    options = {"seed_everything_default": 0, "auto_configure_optimizers": False, "save_config_callback": None}
    monkeypatch.setattr("sys.argv", arguments)
    learner = LightningCLI(SequenceLearner, run=False, **options).model
    assert (learner.curriculum.end, learner.schedule.decay_steps) == (8, 7)
    trainer = small_trainer()
    trainer.fit(learner, small_task())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    hyper_parameters = torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]
    assert hyper_parameters["mixer"]["init_args"] == {"expand": 1.0}
    assert hyper_parameters["curriculum"]["init_args"]["end"] == 8
    again = SequenceLearner.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert again.schedule == learner.schedule
    torch.testing.assert_close(again.state_dict(), learner.state_dict(), rtol=0, atol=0)
