"""A page of TensorBoard's TEXT tab: the parts of the model, with parameters, operations per token and the state that
generation carries, and the complete configuration of the run.
"""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

NOTE = (
    "FLOPs are those of a forward on {length} tokens, per token; a multiplication and an addition are two. Counted are "
    "products with matrices and vectors, convolutions and recurrences; not counted are norms, activation functions and "
    "products of gates. Iterations are the most in training, or the mean of what is drawn. "
    "The state is what generation carries from one token of a sequence to the next."
)


class ModelPage(Callback):
    """Shows the model and the configuration as text.

    Args:
        configuration: of the run, as YAML.
    """

    def __init__(self, configuration: str) -> None:
        self.configuration = configuration

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            length = min(pl_module.curriculum.end, trainer.datamodule.trained_length)
            page = f"{model_table(pl_module, length)}\n\n```yaml\n{self.configuration.strip()}\n```\n"
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_text("model", page, trainer.global_step)


def model_table(pl_module: LightningModule, length: int) -> str:
    """The parts of the model on sequences of so many tokens and their sum, as Markdown."""
    parts = pl_module.model.parts(length)
    columns = {"parameters": [part.parameters for part in parts], "FLOPs": [part.cost.once for part in parts]}
    if iterations := max(part.cost.iterations for part in parts):
        columns["FLOPs of an iteration"] = [part.cost.per_iteration for part in parts]
        columns[f"FLOPs with {iterations:g} iterations"] = [part.cost.most for part in parts]
    columns["state in bytes"] = [part.state_bytes for part in parts]
    names = [*(part.name for part in parts), "**total**"]
    numbers = zip(*([*column, sum(column)] for column in columns.values()), strict=True)
    lines = [["part", *columns], ["---", *("---:" for _ in columns)]]
    lines += [[name, *map(_spoken, row)] for name, row in zip(names, numbers, strict=True)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{NOTE.format(length=length)}"


def _spoken(number: float) -> str:
    return f"{number:,.0f}" if number else "–"
