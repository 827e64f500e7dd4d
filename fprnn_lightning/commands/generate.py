"""What an exported model says after a prompt."""

import inspect
import sys
from pathlib import Path
from pydoc import locate

import torch

from fprnn_lightning.pretrained import check_classes, load_pretrained, read_config
from fprnn_lightning.tasks import SequenceTask


def generate(pretrained: Path, length: int = 16, prompt: list[str] | str | None = None) -> None:
    """Continues prompts with an exported model, greedily, and prints what follows each, a line a prompt.

    Prompts of text are text; of every other task they are the numbers of its tokens, separated by spaces. Where a
    token's label says something about the tokens so far, as in word problems, the first that follows is the label of
    the whole prompt: --length 1.

    Args:
        pretrained: A folder that export has made.
        length: Tokens to generate.
        prompt: A prompt or a list of them; else every line of the standard input is one.

    Raises:
        ValueError: If the folder is none of export's, a prompt is empty or has tokens that the model does not know.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    task = task_class(pretrained)
    learner = load_pretrained(pretrained)
    vocab_size = learner.hparams.vocab_size
    prompts = [prompt] if isinstance(prompt, str) else prompt
    for text in (line.rstrip("\n") for line in sys.stdin) if prompts is None else prompts:
        tokens = task.read_prompt(text)
        if not tokens:
            raise ValueError("prompt: is empty, at least one token is needed")
        if not all(0 <= token < vocab_size for token in tokens):
            unknown = next(token for token in tokens if not 0 <= token < vocab_size)
            raise ValueError(f"prompt: {unknown} is no token of this model, which knows 0 to {vocab_size - 1}")
        print(task.show(learner.generate(torch.tensor([tokens]), length)[0].tolist()), flush=True)


def task_class(pretrained: Path) -> type[SequenceTask]:
    """The class of the task that an exported model was trained on; the base class if that is not known."""
    task = read_config(pretrained).get("task")
    if task is None:
        return SequenceTask
    check_classes(task)
    cls = locate(task["class_path"])
    if not (inspect.isclass(cls) and issubclass(cls, SequenceTask)):
        raise ValueError(f"{pretrained}: its task, {task['class_path']}, cannot be imported")
    return cls
