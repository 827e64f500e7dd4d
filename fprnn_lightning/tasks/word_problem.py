"""The word problem of a finite group: read elements x_0, x_1, ..., say their running product.

y_0 = x_0,  y_t = y_{t-1} x_t
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fprnn_lightning.tasks.base import SequenceTask, Split
from fprnn_lightning.tasks.groups import make_group

SPLIT_SPACE = 2**20
BUCKETS = 32
OWNERS: tuple[Split, ...] = ("validation", "test", "train")  # of bucket 0, of bucket 1, of the others
OWNED = (1, 1, BUCKETS - 2)


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
        owner = OWNERS.index(split)
        candidates = 2 * sequences * BUCKETS // OWNED[owner]  # twice as many as are needed on average
        prefixes = np.empty((k, 0), np.int16)
        while prefixes.shape[1] < sequences:
            drawn = generator.integers(order, size=(k, candidates), dtype=np.int16)
            prefixes = np.concatenate([prefixes, drawn[:, owner_of(drawn, order) == owner]], axis=1)
        rest = generator.integers(order, size=(max(length - k, 0), sequences), dtype=np.int16)
        tokens = np.concatenate([prefixes[:, :sequences], rest])[:length]  # T B: one time step is contiguous

        products = np.empty_like(tokens)
        products[0] = tokens[0]
        places = tokens.astype(np.intp) * order
        for t in range(1, length):
            places[t] += products[t - 1]
            self._next_product.take(places[t], out=products[t], mode="clip")  # all are in range; "clip" need not check
        return tuple(torch.from_numpy(array).T.contiguous().long() for array in (tokens, products))


def owner_of(prefixes: np.ndarray, order: int) -> np.ndarray:
    """Which split each prefix belongs to, whatever the seed.

    Args:
        prefixes: (k, B) elements of a group.
        order: |G|.

    Returns:
        (B,) indices into OWNERS.

    Source: the mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    code = np.zeros(prefixes.shape[1], np.uint64)
    for row in prefixes:
        code = code * np.uint64(order) + row.astype(np.uint64)
    code = (code ^ (code >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    code = (code ^ (code >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.minimum((code ^ (code >> np.uint64(31))) % np.uint64(BUCKETS), 2)
