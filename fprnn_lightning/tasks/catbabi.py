"""catbAbI (concatenated bAbI): read stories of a few sentences one after another, answer the questions in them.

The files are those that the authors' `catbAbI/download_and_preprocess.sh` makes, in https://github.com/ischlag/
Fast-Weight-Memory-public: en-valid-10k_train.txt, en-valid-10k_valid.txt and en-valid-10k_test.txt, or en-valid_*.txt
with a tenth of the stories. A line is a story: the number of the bAbI task, a tab, and words in lower case separated by
spaces. Full stop and question mark are words, and so is an answer, which follows its question mark:

    1	mary moved to the bathroom . john went to the hallway . where is mary ? bathroom

The file vocab.pkl beside them is not read, as a pickle may run anything: words are numbered in alphabetical order.

Source: Schlag, Munkhdalai, Schmidhuber, "Learning Associative Inference Using Fast Weight Memory", ICLR 2021, arXiv
2011.07831, after Weston et al., "Towards AI-Complete Question Answering", arXiv 1502.05698.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fprnn_lightning.tasks.base import Batch, Split
from fprnn_lightning.tasks.contexts import ContextTask

IGNORED = -100
QUESTION = "?"
END = "<eos>"
MADE_BY = "catbAbI/download_and_preprocess.sh of https://github.com/ischlag/Fast-Weight-Memory-public"


class CatBabi(ContextTask):
    """catbAbI: stories packed one after another, each question to be answered with one word.

    An example row, <eos> being what comes before a story::

        tokens     ?  here <eos> mary went home    .   she slept    . where   is mary    ?
        targets -100  -100  -100 -100 -100 -100 -100  -100  -100 -100  -100 -100 -100 home

    Only answers are scored, at their question marks, as in the published question-answering mode. Answers are given
    after they have been asked for: later questions of a story may come back to them.

    A context is the stretch of the file that ends with a question; what it has of a story that began before it is read
    but not scored, so whatever is asked can be answered. Training contexts end with a random question, the evaluation
    sets go through all questions, whatever the seed: n contexts are spread evenly over the file, and as many contexts
    as questions end with each of them once, so that the last-token accuracy is over all questions, as the published one
    is. But published batches are cut out of one endless stream, the state of the model being carried over. It is not
    carried here: questions further from the beginning of their story than a context is long are left out.

    Args:
        folder: Where the files are.
        stories: "10k" for en-valid-10k_*.txt, "1k" for en-valid_*.txt.
        train_length: Tokens of a training context.
        validation_lengths: Lengths, in tokens, at which validation measures; all are prefixes of the longest.
        test_lengths: The same for test; 50 is added.
        **shared: The options of every task.

    Raises:
        ValueError: If files are missing, cannot be read or are malformed, with the number of the line; a context is too
            short for any question or longer than a file; or a shared option is out of range.
    """

    prefix_closed = False
    name = "catbabi"

    def __init__(
        self,
        folder: Path,
        stories: Literal["10k", "1k"] = "10k",
        train_length: int = 200,
        validation_lengths: Sequence[int] = (200,),
        test_lengths: Sequence[int] = (100, 200, 400),
        **shared: Any,
    ) -> None:
        super().__init__(
            train_length=train_length, validation_lengths=validation_lengths, test_lengths=test_lengths, **shared
        )
        prefix = "en-valid-10k" if stories == "10k" else "en-valid"
        files = {"train": "train", "validation": "valid", "test": "test"}
        paths = {split: folder / f"{prefix}_{file}.txt" for split, file in files.items()}
        if missing := [path.name for path in paths.values() if not path.is_file()]:
            raise ValueError(f"folder: {folder} lacks {', '.join(missing)}, which {MADE_BY} makes.")
        read = {split: read_stories(path) for split, path in paths.items()}
        words = sorted({word for some in read.values() for story in some for word in story})
        ids = {word: number for number, word in enumerate(words)}
        self._vocab_size, self._question, self._end = len(words), ids[QUESTION], ids[END]
        self._words = {split: np.array([ids[word] for story in some for word in story]) for split, some in read.items()}
        options = {"train_length": train_length, "validation_lengths": self.validation_lengths[-1]}
        options["test_lengths"] = self.test_lengths[-1]
        self._questions = {}
        for (split, stream), (option, length) in zip(self._words.items(), options.items(), strict=True):
            places = np.arange(len(stream))
            begun = np.maximum.accumulate(np.where(stream == self._end, places, 0))  # where each token's story begins
            questions = np.flatnonzero(stream == self._question)
            since = (places - begun)[questions]
            if not since.min() < length < len(stream):
                least = f"{option} must reach a question, {since.min() + 1} tokens, and stay below the {len(stream)} of"
                raise ValueError(f"{least} {paths[split]}, got {length}.")
            self._questions[split] = questions[since < length]

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def places(self, split: Split) -> int:
        return len(self._questions[split])

    def contexts(self, split: Split, places: np.ndarray, length: int) -> Batch:
        last = self._questions[split][places, None]
        read = self._words[split].take(last + np.arange(1 - length, 2), mode="wrap")
        tokens, targets = read[:, :-1], read[:, 1:]
        scored = (tokens == self._question) & (tokens == self._end).cumsum(1).astype(bool)
        targets = np.where(scored, targets, IGNORED)
        return torch.from_numpy(tokens).contiguous(), torch.from_numpy(targets)


def read_stories(path: Path) -> list[list[str]]:
    """The words of each story, <eos> first.

    Raises:
        ValueError: If the file cannot be read or holds anything else, with the number of the line.
    """
    stories = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read, {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8, {error.reason}.") from error
    for number, line in enumerate(lines, 1):
        task, tab, text = line.partition("\t")
        words = text.split()
        if not (task.isdecimal() and tab and words):
            raise ValueError(f"{path}, line {number}: a number, a tab and a story are needed, not {line[:40]!r}.")
        if QUESTION not in words or words[-1] == QUESTION:
            raise ValueError(f"{path}, line {number}: there is no question mark with an answer after it.")
        stories.append([END, *words])
    if not stories:
        raise ValueError(f"{path}: the file is empty.")
    return stories
