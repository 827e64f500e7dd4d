"""The line printed at the start of a fit."""

from fprnn_lightning.callbacks import StartLine


def test_it_names_device_backend_parameters_and_tokens(small_learner, small_task, small_trainer, capsys):
    learner = small_learner()
    trainer = small_trainer(callbacks=[StartLine()], accumulate_grad_batches=2)
    trainer.fit(learner, small_task(batch_size=1000))
    line = capsys.readouterr().out.strip()
    parameters = sum(parameter.numel() for parameter in learner.parameters())
    assert line.startswith("device cpu · scan backend ")
    steps = "8,000 tokens per step (1000 sequences of up to 8)"
    assert line.endswith(f" · {parameters:,} parameters · {steps} · {trainer.log_dir}")
