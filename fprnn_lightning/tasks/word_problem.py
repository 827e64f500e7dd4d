"""The word problem of a finite group: read elements x_0, x_1, ..., say their running product.

y_0 = x_0,  y_t = y_{t-1} x_t
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fprnn_lightning.tasks.base import SequenceTask, Split
from fprnn_lightning.tasks.groups import few_generators, make_group
from fprnn_lightning.tasks.splits import SPLIT_SPACE, draw_owned


class WordProblem(SequenceTask):
    """The word problem of a finite group: every position is labelled with the product of the elements up to it.

    An example row for Z7, where the product is addition mod 7::

        tokens   3  5  6  0  2
        targets  3  1  0  0  2

    Products run from left to right, y_t = table[y_{t-1}, x_t], "what came before, then x_t" (see `groups`). Every
    position is scored. The first is a copy of its token, and is scored because the published token accuracy counts it;
    there is no start token, so nothing given is scored besides. To learn the product of a whole sequence only, give
    --model.labels last.

    Training sequences may have several lengths in one batch; a shorter one is filled up with the identity, not scored.
    With `pairs`, that many of a batch have two tokens, and the others are of uniform length. So a row of three of five
    tokens is::

        tokens   3  5  6     0     0
        targets  3  1  0  -100  -100

    A length curriculum cuts what is longer, and goes by the accuracy of the longest. In evaluation, all are of full
    length, and one pass measures every length.

    The splits are disjoint by construction: a hash of a sequence's first k tokens says which split it belongs to (1/32
    validation, 1/32 test), k = `prefix_length` being the smallest for which there are 2^20 of them (4 for A5, 3 for S5;
    10 and 13 with few generators). No sequence of an evaluation set, nor any prefix of it of k tokens or more, occurs
    in training, whatever the lengths and seeds.
    There are too few sequences shorter than k to keep apart: they may occur in every split.

    Args:
        group: Z<n>, S<n>, A<n> or a product of these such as A4xZ2, with 2 to 2000 elements.
        generators: What sequences are made of: "all" elements, or a "few" of which all are products (the identity and
            three 3-cycles for A5; the identity, a 5-cycle and a swap for S5; see `groups.few_generators`). Labels, and
            so the vocabulary, are all elements in both cases.
        least_length: Tokens of the shortest training sequences, the lengths being uniform from it to `train_length`;
            null for all to have `train_length`.
        pairs: Share of the sequences of each training batch that have two tokens, between 0 and 1.
        **shared: The options of every task.

    Raises:
        ValueError: If there is no such group, or an option is out of range.

    Source: Merrill, Petty, Sabharwal, "The Illusion of State in State-Space Models", ICML 2024, arXiv 2404.08819.
        Pairs: Walker et al., "Structured Linear CDEs", NeurIPS 2025, arXiv 2505.17761.
    """

    def __init__(
        self,
        group: str = "A5",
        generators: Literal["all", "few"] = "all",
        least_length: int | None = None,
        pairs: float = 0.0,
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        self.group = make_group(group)
        if self.group.order == 1:
            raise ValueError(f"The group {group!r} has one element, so nothing to predict: write a larger one like A5.")
        if least_length is not None and not 1 <= least_length <= self.train_length:
            raise ValueError(f"least_length must be from 1 to train_length={self.train_length}, got {least_length}.")
        if not 0 <= pairs <= 1:
            raise ValueError(f"pairs must be a share from 0 to 1, got {pairs}.")
        if pairs and self.train_length < 2:
            raise ValueError(f"pairs need a train_length of at least 2, got {self.train_length}.")
        self.least_length = least_length
        self.pairs = pairs
        few = few_generators(group) if generators == "few" else np.arange(self.group.order)
        self.generators = few.astype(np.int16)
        self.prefix_length = next(k for k in range(1, 21) if len(few) ** k >= SPLIT_SPACE)
        # x * |G| + y -> y x, in a type just wide enough for 2000 elements: the table of A5 fits the fastest cache
        self._next_product = self.group.table.T.astype(np.int16).ravel()

    @property
    def name(self) -> str:
        return self.group.name.lower()

    @property
    def vocab_size(self) -> int:
        return self.group.order

    def generate(
        self, generator: np.random.Generator, split: Split, sequences: int, length: int
    ) -> tuple[Tensor, Tensor]:
        letters, k = len(self.generators), self.prefix_length

        def draw(number: int) -> np.ndarray:
            return generator.integers(letters, size=(k, number), dtype=np.int16)

        prefixes = draw_owned(draw, split, sequences, letters)
        rest = generator.integers(letters, size=(max(length - k, 0), sequences), dtype=np.int16)
        tokens = np.concatenate([prefixes, rest])[:length]  # T B: one time step is contiguous
        if letters < self.group.order:
            tokens = self.generators[tokens]

        products = np.empty_like(tokens)
        products[0] = tokens[0]
        places = tokens.astype(np.intp) * self.group.order
        for t in range(1, length):
            places[t] += products[t - 1]
            self._next_product.take(places[t], out=products[t], mode="clip")  # all are in range; "clip" need not check
        if split == "train" and (self.least_length or self.pairs):
            lengths = generator.integers(self.least_length or length, length, size=sequences, endpoint=True)
            lengths[: round(self.pairs * sequences)] = 2
            padding = np.arange(length)[:, None] >= lengths
            tokens[padding], products[padding] = 0, -100
        return tuple(torch.from_numpy(array).T.contiguous().long() for array in (tokens, products))
