"""Early end of training once the longest validation sequences end right."""

from lightning.pytorch import Callback, LightningModule, Trainer


class StopWhenSolved(Callback):
    """Stops, on all ranks at once, when the last-token accuracy at the longest validation length reaches a threshold.

    Args:
        threshold: last-token accuracy, in (0, 1].
    """

    def __init__(self, threshold: float = 0.999) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"StopWhenSolved: threshold is {threshold}, must be above 0 and at most 1")
        self.threshold = threshold
        self.solved = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.solved  # of a run that was over but for its test

    def state_dict(self) -> dict[str, bool]:
        return {"solved": self.solved}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        self.solved = state["solved"]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        length = pl_module.validation_accuracy.lengths[-1]
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            accuracy = trainer.callback_metrics[f"validation/last_token_accuracy_{length}"].item()
            if trainer.strategy.reduce_boolean_decision(accuracy >= self.threshold):
                self.solved = trainer.should_stop = True
                if trainer.is_global_zero:
                    print(f"solved after step {trainer.global_step}: {accuracy:.2%} right at {length}", flush=True)
