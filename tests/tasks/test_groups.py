"""Groups: the axioms, the documented order of elements and of composition, and what is said about bad names."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fprnn_lightning.tasks.groups import few_generators, make_group

FACTORS = ["Z1", "Z2", "Z3", "Z5", "Z60", "S1", "S2", "S3", "S4", "A1", "A2", "A3", "A4", "A5"]
NAMES = st.lists(st.sampled_from(FACTORS), min_size=1, max_size=3).map("x".join)


def product_order(name):
    orders = {"Z": lambda n: n, "S": lambda n: [1, 1, 2, 6, 24, 120][n], "A": lambda n: [1, 1, 1, 3, 12, 60][n]}
    return int(np.prod([orders[factor[0]](int(factor[1:])) for factor in name.split("x")]))


def cayley(name):
    return make_group(name).table


@settings(max_examples=40, deadline=None)
@given(NAMES.filter(lambda name: product_order(name) <= 400), st.randoms(use_true_random=False))
def test_axioms(name, random):
    group = make_group(name)
    table, n = group.table, product_order(name)
    assert group.order == len(set(group.elements)) == n
    assert table.shape == (n, n)
    everything = np.arange(n)
    assert (np.sort(table, axis=0) == everything[:, None]).all()  # Latin square
    assert (np.sort(table, axis=1) == everything).all()
    assert (table[0] == everything).all()  # element 0 is the identity on both sides
    assert (table[:, 0] == everything).all()
    inverse = np.argmax(table == 0, axis=1)
    assert (table[everything, inverse] == 0).all()
    assert (table[inverse, everything] == 0).all()
    c = random.randrange(n)
    assert (table[table, c] == table[:, table[:, c]]).all()  # (a b) c = a (b c) for all a, b


@pytest.mark.parametrize(
    ("name", "order"), [("A5", 60), ("S5", 120), ("S4", 24), ("S6", 720), ("A6", 360), ("Z2000", 2000), ("A4xZ2", 24)]
)
def test_orders(name, order):
    assert make_group(name).order == len(make_group(name).table) == order


@pytest.mark.parametrize("name", ["S3", "S4", "A4", "A5"])
def test_a_b_is_a_then_b(name):
    group = make_group(name)
    for a, b in itertools.product(range(group.order), repeat=2):
        letters = list("abcde"[: len(group.elements[0])])
        moved = letters
        for permutation in (group.elements[a], group.elements[b]):  # apply a, then b: the thing at i goes to p[i]
            after = [None] * len(moved)
            for i, thing in enumerate(moved):
                after[permutation[i]] = thing
            moved = after
        at_once = [None] * len(letters)
        for i, thing in enumerate(letters):
            at_once[group.elements[group.table[a, b]][i]] = thing
        assert at_once == moved


def test_order_of_elements():
    assert make_group("Z4").elements == (0, 1, 2, 3)
    assert make_group("S3").elements == ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
    assert make_group("A3").elements == ((0, 1, 2), (1, 2, 0), (2, 0, 1))
    assert make_group("Z2xZ3").elements == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))


def test_products_multiply_factor_by_factor():
    group, left, right = make_group("S3xA4"), cayley("S3"), cayley("A4")
    for a, b in itertools.product(range(group.order), repeat=2):
        assert divmod(group.table[a, b], 12) == (left[a // 12, b // 12], right[a % 12, b % 12])


def closure(table, members):
    """All products of some elements."""
    while len(larger := np.unique(table[np.ix_(members, members)])) > len(members):
        members = larger
    return members


@settings(max_examples=60, deadline=None)
@given(NAMES.filter(lambda name: product_order(name) <= 400))
def test_few_generators_generate_all(name):
    few = few_generators(name)
    assert (np.diff(few) > 0).all()
    assert few[0] == 0
    assert len(few) <= 1 + sum(max(2, int(factor[1:]) - 2) for factor in name.split("x"))
    assert len(closure(cayley(name), few)) == product_order(name)


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("Z1", [0]),
        ("Z60", [0, 1]),
        ("S2", [(0, 1), (1, 0)]),
        ("S5", [(0, 1, 2, 3, 4), (1, 0, 2, 3, 4), (1, 2, 3, 4, 0)]),
        ("A5", [(0, 1, 2, 3, 4), (1, 2, 0, 3, 4), (1, 3, 2, 0, 4), (1, 4, 2, 3, 0)]),
        ("A3xZ2", [((0, 1, 2), 0), ((0, 1, 2), 1), ((1, 2, 0), 0)]),
    ],
)
def test_few_generators(name, elements):
    group = make_group(name)
    assert [group.elements[index] for index in few_generators(name)] == elements


def commutator_subgroup(table):
    inverse = np.argmax(table == 0, axis=1)
    members = set(table[table[inverse[:, None], inverse], table].ravel().tolist())  # a^-1 b^-1 a b
    while True:
        larger = {int(x) for x in table[np.ix_(sorted(members), sorted(members))].ravel()}
        if larger == members:
            return len(members)
        members |= larger


@pytest.mark.parametrize(("name", "order"), [("Z6", 1), ("S3", 3), ("A4", 4), ("S4", 12), ("A5", 60), ("S5", 60)])
def test_commutator_subgroup(name, order):
    # A5 is its own: it is not solvable, which is what makes its word problem hard.
    assert commutator_subgroup(cayley(name)) == order


def test_conjugacy_classes_of_a5_show_it_simple():
    table = cayley("A5")
    inverse = np.argmax(table == 0, axis=1)
    conjugates = table[table[inverse[:, None], np.arange(60)], np.arange(60)[:, None]]  # g^-1 a g
    classes = {frozenset(column.tolist()) for column in conjugates.T}
    sizes = sorted(map(len, classes))
    assert sizes == [1, 12, 12, 15, 20]
    normal_orders = {1 + sum(chosen) for r in range(5) for chosen in itertools.combinations(sizes[1:], r)}
    assert {order for order in normal_orders if 60 % order == 0} == {1, 60}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a5", ["'a5'", "Z<n>", "S<n>", "A<n>", "example A5"]),
        ("A4XZ2", ["'A4XZ2'", "example A4xZ2"]),
        ("D4", ["'D4'"]),
        ("Z0", ["'Z0'"]),
        ("", ["''"]),
        ("A5x", ["'A5x'"]),
        ("S3 x Z2", ["'S3 x Z2'"]),
        ("Z\u0665", ["Unknown"]),
        ("S7", ["'S7'", "too large", "2000", "Z<n>", "example S"]),
        ("Z2001", ["too large"]),
        ("S999999999", ["too large"]),
        ("S6xS3", ["too large"]),
    ],
)
def test_bad_names_are_answered_in_one_sentence(name, words):
    with pytest.raises(ValueError) as error:
        make_group(name)
    message = str(error.value)
    assert all(word in message for word in words)
    assert "\n" not in message
    assert message.count(". ") == 0
    assert message.endswith(".")
