"""A resumed run sees the very batches that an uninterrupted one would have seen."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from fprnn_lightning.tasks import WordProblem

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),  # resumed runs here save nothing
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # lightning's use of torch
]


class Recorder(LightningModule):
    """Learns one number; remembers its batches, and fails in the training step `failing`."""

    def __init__(self, failing=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.failing = failing
        self.seen = []

    def training_step(self, batch, _):
        if len(self.seen) == self.failing:
            raise RuntimeError("power cut")
        self.seen.append(batch[0].clone())
        return self.weight * batch[0].float().mean()

    def validation_step(self, batch, _):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, checkpoint=None, workers=0, resume=None, failing=None, **options):
    model = Recorder(failing)
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        callbacks=checkpoint,
        enable_checkpointing=checkpoint is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": 5, "limit_val_batches": 0, **options},
    )
    trainer.fit(model, datamodule=WordProblem("S3", batch_size=4, train_length=20, workers=workers), ckpt_path=resume)
    return model.seen


def expected(steps, parts=1):
    task = WordProblem("S3", batch_size=4, train_length=20)
    return [part for index in range(steps) for part in task.batch("train", index)[0].chunk(parts)]


def same(seen, wanted):
    return len(seen) == len(wanted) and all(map(torch.equal, seen, wanted))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"limit_train_batches": 2},  # step 3 is the middle of the second epoch
        {"limit_train_batches": 3},  # step 3 is the end of an epoch
        {"limit_val_batches": 1, "val_check_interval": 3, "check_val_every_n_epoch": None},
    ],
    ids=["one endless epoch", "accumulation", "mid epoch", "end of epoch", "after validation"],
)
def test_resumed_batches(tmp_path, workers, options):
    when = {} if "val_check_interval" in options else {"every_n_train_steps": 3}
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **when)

    parts = options.get("accumulate_grad_batches", 1)
    whole = fit(tmp_path, checkpoint, workers, **options)
    assert same(whole, expected(5, parts))
    rest = fit(tmp_path, workers=workers, resume=tmp_path / "step=3.ckpt", **options)
    assert same(rest, whole[3 * parts :])


def test_a_batch_interrupted_by_an_error_is_seen_again(tmp_path):
    with pytest.raises(RuntimeError, match="power cut"):
        fit(tmp_path, ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=9, save_on_exception=True), failing=3)
    rest = fit(tmp_path, resume=tmp_path / "step=3.ckpt")
    assert same(rest, expected(5)[3:])
