"""The word problem of a finite group: read elements x_0, x_1, ..., say their running product.

y_0 = x_0,  y_t = y_{t-1} x_t
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fprnn_lightning.tasks.base import SequenceTask, Split
from fprnn_lightning.tasks.groups import make_group
from fprnn_lightning.tasks.splits import SPLIT_SPACE, draw_owned


class WordProblem(SequenceTask):
    """The word problem of a finite group: every position is labelled with the product of the elements up to it.

    An example row for Z7, where the product is addition mod 7::

        tokens   3  5  6  0  2
        targets  3  1  0  0  2

    Products run from left to right, y_t = table[y_{t-1}, x_t], "what came before, then x_t" (see `groups`). Every
    position is scored. The first is a copy of its token, and is scored because the published token accuracy counts it;
    there is no start token, so nothing given is scored besides.

    The splits are disjoint by construction: a hash of a sequence's first k tokens says which split it belongs to (1/32
    validation, 1/32 test), k = `prefix_length` being the smallest with |G|^k ≥ 2^20 (4 for A5, 3 for S5). No sequence
    of an evaluation set, nor any prefix of it of k tokens or more, occurs in training, whatever the lengths and seeds.
    There are too few sequences shorter than k to keep apart: they may occur in every split.

    Args:
        group: Z<n>, S<n>, A<n> or a product of these such as A4xZ2, with 2 to 2000 elements.
        **shared: The options of every task.

    Raises:
        ValueError: If there is no such group, or a shared option is out of range.

    Source: Merrill, Petty, Sabharwal, "The Illusion of State in State-Space Models", ICML 2024, arXiv 2404.08819.
    """

    def __init__(self, group: str = "A5", **shared: Any) -> None:
        super().__init__(**shared)
        self.group = make_group(group)
        if self.group.order == 1:
            raise ValueError(f"The group {group!r} has one element, so nothing to predict: write a larger one like A5.")
        self.prefix_length = next(k for k in range(1, 21) if self.group.order**k >= SPLIT_SPACE)
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
        order, k = self.group.order, self.prefix_length

        def draw(number: int) -> np.ndarray:
            return generator.integers(order, size=(k, number), dtype=np.int16)

        prefixes = draw_owned(draw, split, sequences, order)
        rest = generator.integers(order, size=(max(length - k, 0), sequences), dtype=np.int16)
        tokens = np.concatenate([prefixes, rest])[:length]  # T B: one time step is contiguous

        products = np.empty_like(tokens)
        products[0] = tokens[0]
        places = tokens.astype(np.intp) * order
        for t in range(1, length):
            places[t] += products[t - 1]
            self._next_product.take(places[t], out=products[t], mode="clip")  # all are in range; "clip" need not check
        return tuple(torch.from_numpy(array).T.contiguous().long() for array in (tokens, products))
