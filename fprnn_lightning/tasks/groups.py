"""Finite groups from their written names, as Cayley tables.

`table[a, b]` is the element "a, then b", so a word is multiplied from left to right: y_t = table[y_{t-1}, x_t]. For
permutations, written as the tuple of their images, "a, then b" sends i to b[a[i]].
"""

import difflib
import itertools
import math
import re
from dataclasses import dataclass

import numpy as np

MAX_ORDER = 2000
EXAMPLES = ("A4", "A5", "A6", "S3", "S4", "S5", "S6", "Z2", "Z7", "Z60", "A4xZ2", "A5xZ2", "S3xZ2xZ2", "Z3xZ5")


@dataclass(frozen=True, eq=False)
class Group:
    """A finite group.

    Args:
        name: The written name, for example "A4xZ2".
        elements: What each index stands for: an integer (Z), a tuple of images (S, A), or a pair of such for each `x`.
            Element 0 is the identity.
        table: (|G|, |G|) int64; `table[a, b]` is the index of "a, then b".
    """

    name: str
    elements: tuple
    table: np.ndarray

    @property
    def order(self) -> int:
        """The number of elements, |G|."""
        return len(self.elements)


def make_group(name: str) -> Group:
    """Builds the group with a written name.

    Args:
        name: Z<n> (integers mod n, in ascending order), S<n> (all permutations of n points, in lexicographic order),
            A<n> (the even ones, in the same order), or a direct product of these written with `x`, for example A4xZ2
            (ordered by the first factor, then by the second).

    Raises:
        ValueError: If the name is none of these, or the group has more than 2000 elements.
    """
    factors = name.split("x")
    if not all(re.fullmatch(r"[ZSA][1-9]\d{0,8}", factor) for factor in factors):
        raise ValueError(
            f"Unknown group {name!r}: a group is written Z<n>, S<n>, A<n> or a product of these with x, "
            f"for example {_nearest(name)}."
        )
    if math.prod(map(_order, factors)) > MAX_ORDER:
        raise ValueError(
            f"The group {name!r} is too large: Z<n>, S<n>, A<n> and their products with x may have at most "
            f"{MAX_ORDER} elements, for example {_nearest(name)}."
        )
    elements, table = _factor(factors[0])
    for factor in factors[1:]:
        right_elements, right = _factor(factor)
        elements = tuple(itertools.product(elements, right_elements))
        # index of the pair (a, b) = a * |right| + b, on both axes
        table = (table[:, None, :, None] * len(right) + right[None, :, None, :]).reshape(len(elements), len(elements))
    return Group(name, elements, table)


def few_generators(name: str) -> np.ndarray:
    """A few elements of which every element is a product: the identity, and of each factor, with the others at rest,

        Z<n>  1
        S<n>  each point to the next, the last to the first; the swap of the first two
        A<n>  the 3-cycles that send the first point to the second, that to the x-th, that to the first, x = 3 ... n

    No inverses are added: in a finite group each is a power.

    Args:
        name: The written name of a group that `make_group` builds.

    Returns:
        Their indices, ascending.

    Source: Liu, Ash, Goel, Krishnamurthy, Zhang, "Transformers Learn Shortcuts to Automata", ICLR 2023, arXiv
        2210.10749, and the automata of its public data.
    """
    indices, stride = {0}, 1
    for factor in reversed(name.split("x")):
        elements, _ = _factor(factor)
        indices |= {elements.index(element) * stride for element in _generators(factor)}
        stride *= len(elements)
    return np.array(sorted(indices))


def _nearest(name: str) -> str:
    written = name.upper().replace("X", "x")
    family = [example for example in EXAMPLES if example[0] == written[:1]]
    return difflib.get_close_matches(written, family or EXAMPLES, n=1, cutoff=0.0)[0]


def _order(factor: str) -> int:
    family, n = factor[0], int(factor[1:])
    if family == "Z":
        return n
    permutations = math.factorial(min(n, 8))  # 8! is too large already
    return permutations if family == "S" or n == 1 else permutations // 2


def _factor(factor: str) -> tuple[tuple, np.ndarray]:
    family, n = factor[0], int(factor[1:])
    if family == "Z":
        return tuple(range(n)), np.add.outer(np.arange(n), np.arange(n)) % n
    permutations = np.array(list(itertools.permutations(range(n))))  # |S_n| n
    if family == "A":
        inversions = sum(permutations[:, i] > permutations[:, j] for i, j in itertools.combinations(range(n), 2))
        permutations = permutations[np.broadcast_to(inversions, len(permutations)) % 2 == 0]
    digits = n ** np.arange(n)[::-1]  # read as base-n numbers, lexicographic order is numeric order
    composed = permutations[:, permutations] @ digits  # b a: b[a[i]]
    return tuple(map(tuple, permutations.tolist())), np.searchsorted(permutations @ digits, composed).T


def _generators(factor: str) -> list:
    family, points = factor[0], tuple(range(int(factor[1:])))
    if family == "Z":
        return [1 % len(points)]
    if family == "S":
        return [points[1:] + points[:1], points[1::-1] + points[2:]]
    return [(1, x, *points[2:x], 0, *points[x + 1 :]) for x in points[2:]]
