"""Every channel mixer against its own dense matrix, and the bounds that the contraction rests on."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fprnn_lightning.channel_mixers import ChannelMixer, base
from fprnn_lightning.channel_mixers.dense import Dense
from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.channel_mixers.kronecker import Kronecker
from fprnn_lightning.channel_mixers.low_rank import LowRank
from fprnn_lightning.channel_mixers.monarch import Monarch
from fprnn_lightning.channel_mixers.orthogonal import Orthogonal
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer

FACTORIES = {
    "Householder 1": Householder,
    "Householder 2": partial(Householder, rank=2),
    "Householder 3": partial(Householder, rank=3),
    "LowRank 1": LowRank,
    "LowRank 3": partial(LowRank, rank=3),
    "Kronecker": Kronecker,
    "Monarch": Monarch,
    "Orthogonal": Orthogonal,
    "Dense": Dense,
}
NEVER_BEYOND_ONE = ["Householder 1", "LowRank 1", "Kronecker", "Orthogonal", "Dense"]  # ||I - Q|| where largest is 1
every_mixer = pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
examples = given(
    channels=st.integers(3, 9),
    largest=st.sampled_from([0.5, 1.0, 2.0]),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 2**16),
)


def _raw(mixer: ChannelMixer, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, mixer.raw_channels, dtype=torch.double)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.double)


def _norm(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(matrix, 2)


def test_every_channel_mixer_is_tested():
    tested = {type(factory(4)) for factory in FACTORIES.values()}
    assert tested == set(ChannelMixer.__subclasses__())


@every_mixer
@pytest.mark.parametrize("shape", [(), (2, 5)], ids=str)
@examples
@settings(max_examples=15, deadline=None)
def test_apply_residual_and_solve_are_those_of_the_dense_matrix(factory, shape, channels, largest, scale, seed):
    torch.manual_seed(seed)
    mixer = factory(channels, largest=largest).double()
    raw, v, gain = _raw(mixer, *shape, scale=scale), _random(*shape, channels), 2 * torch.rand(*shape, channels) - 1
    gain = gain.double()
    q, matrix, identity = mixer.coefficients(raw), mixer.dense_matrix(raw), torch.eye(channels, dtype=torch.double)
    assert matrix.shape == (*shape, channels, channels)
    torch.testing.assert_close(mixer.apply(q, v), (matrix @ v[..., None])[..., 0])
    torch.testing.assert_close(mixer.residual_apply(q, v), ((identity - matrix) @ v[..., None])[..., 0])
    system, h = identity - gain[..., None] * (identity - matrix), mixer.solve(q, gain, v)
    error = (system @ h[..., None])[..., 0] - v
    assert (error.abs() <= 1e-10 * (1 + h.abs().amax(-1, keepdim=True))).all()  # h is large near a singular system


@every_mixer
@examples
@settings(max_examples=30, deadline=None)
def test_the_bound_holds(factory, channels, largest, scale, seed):
    torch.manual_seed(seed)
    mixer = factory(channels, largest=largest).double()
    raw = _raw(mixer, 20, scale=scale)
    residual = torch.eye(channels, dtype=torch.double) - mixer.dense_matrix(raw)
    bound = mixer.residual_bound(mixer.coefficients(raw)).expand(20)
    assert (bound >= _norm(residual) - 1e-7).all()
    if not isinstance(mixer, Monarch):
        torch.testing.assert_close(bound, _norm(residual), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", NEVER_BEYOND_ONE)
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_these_contract_whatever_the_raw_terms(name, scale):
    torch.manual_seed(0)
    mixer = FACTORIES[name](12).double()
    residual = torch.eye(12, dtype=torch.double) - mixer.dense_matrix(_raw(mixer, 200, scale=scale))
    assert _norm(residual).max() <= 1 + 1e-12


@every_mixer
@pytest.mark.parametrize("largest", [1.0, 2.0])
def test_gradients_of_apply_solve_and_bound(factory, largest):
    torch.manual_seed(0)
    mixer = factory(4, largest=largest).double()
    weights = [weight.requires_grad_() for weight in mixer.parameters()]
    raw, v = _raw(mixer, 2).requires_grad_(), _random(2, 4).requires_grad_()
    gain = (0.9 * torch.rand(2, 4).double()).requires_grad_()
    check = torch.autograd.gradcheck
    assert check(lambda raw, v, *_: mixer.apply(mixer.coefficients(raw), v), (raw, v, *weights))
    assert check(lambda raw, g, v, *_: mixer.solve(mixer.coefficients(raw), g, v), (raw, gain, v, *weights))


@pytest.mark.parametrize("factory", [Kronecker, Orthogonal])
def test_iterating_finds_what_factorising_finds(factory, monkeypatch):
    torch.manual_seed(0)
    mixer = factory(6).double()
    raw, v = _raw(mixer, 3, 5).requires_grad_(), _random(3, 5, 6).requires_grad_()
    gain = (1.8 * torch.rand(3, 5, 6).double() - 0.9).requires_grad_()
    inputs, found = [gain, v, *([raw] if mixer.raw_channels else mixer.parameters())], []
    for factorised in (6, 5):
        monkeypatch.setattr(base, "LARGEST_FACTORISED", factorised)
        h = mixer.solve(mixer.coefficients(raw), gain, v)
        found.append([h, *torch.autograd.grad(h.sin().sum(), inputs)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)
    with torch.inference_mode():
        torch.testing.assert_close(mixer.solve(mixer.coefficients(raw), gain, v), found[0][0])


def test_iterating_judges_every_token_alone_and_owns_up_to_failure(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(base, "LARGEST_FACTORISED", 0)
    mixer = Kronecker(6).double()
    raw, gain, v = _raw(mixer, 3), torch.full((3, 6), 0.9).double(), _random(3, 6)
    expected = mixer.solve(mixer.coefficients(raw), gain, v)
    gain[1] = 3
    h = mixer.solve(mixer.coefficients(raw), gain, v)
    assert h[1].isnan().all()
    torch.testing.assert_close(h[[0, 2]], expected[[0, 2]])


@every_mixer
@pytest.mark.parametrize("scale", [0.0, 0.3, 300.0])
@pytest.mark.parametrize("channels", [1, 7, 12])
def test_rounded_inputs_give_finite_values_and_gradients(factory, channels, scale):
    torch.manual_seed(0)
    mixer = factory(max(channels, getattr(factory, "keywords", {}).get("rank", 1)))
    raw = _raw(mixer, 2, 3, scale=scale).bfloat16().float().requires_grad_()
    v, gain = torch.randn(2, 3, mixer.channels).bfloat16().float(), torch.rand(2, 3, mixer.channels)
    q = mixer.coefficients(raw)
    total = mixer.apply(q, v).square().sum() + mixer.solve(q, 0.5 * gain, v).square().sum()
    total.backward()
    assert total.isfinite()
    for tensor in (raw, *mixer.parameters()) if mixer.raw_channels else mixer.parameters():
        assert tensor.grad.isfinite().all()


def test_a_noncontiguous_tensor_is_solved_for(monkeypatch):
    torch.manual_seed(0)
    mixer = Kronecker(6).double()
    raw, gain, v = _raw(mixer, 3, 5), 0.5 * torch.rand(3, 5, 6).double(), _random(6, 5, 3).permute(2, 1, 0)
    expected = mixer.solve(mixer.coefficients(raw), gain, v)
    monkeypatch.setattr(base, "LARGEST_FACTORISED", 5)
    torch.testing.assert_close(mixer.solve(mixer.coefficients(raw), gain, v), expected)


@every_mixer
def test_autocast_rounds_nothing(factory):
    torch.manual_seed(0)
    mixer = factory(12)
    raw, v, gain = _raw(mixer, 2).float(), torch.randn(2, 12), torch.rand(2, 12)

    def results():
        q = mixer.coefficients(raw)
        return mixer.residual_apply(q, v), mixer.solve(q, gain, v), mixer.residual_bound(q)

    exact = results()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(rounded, value) for rounded, value in zip(results(), exact, strict=True))


def test_householder_never_stretches():
    torch.manual_seed(0)
    for rank, largest, scale in ((1, 2.0, 1.0), (2, 1.0, 30.0), (3, 2.0, 30.0)):
        mixer = Householder(6, rank, largest)
        raw = _raw(mixer, 100, scale=scale)
        assert _norm(mixer.dense_matrix(raw)).max() <= 1 + 1e-12


def test_householder_is_the_product_in_the_documented_order():
    torch.manual_seed(0)
    mixer = Householder(5, 3)
    raw = _raw(mixer)
    directions = torch.nn.functional.silu(raw[:15]).reshape(3, 5)
    product = torch.eye(5, dtype=torch.double)
    for u, alpha in zip(directions, raw[15:].sigmoid(), strict=True):
        product = product @ (torch.eye(5, dtype=torch.double) - alpha * torch.outer(u, u) / (u @ u))
    torch.testing.assert_close(mixer.dense_matrix(raw), product)


def test_low_rank_is_the_sum_and_one_term_is_householder():
    torch.manual_seed(0)
    mixer = LowRank(5, 2, largest=2.0)
    raw = _raw(mixer)
    directions = torch.nn.functional.normalize(torch.nn.functional.silu(raw[:10]).reshape(2, 5), dim=-1)
    expected = torch.eye(5, dtype=torch.double)
    for u, alpha in zip(directions, 2 * raw[10:].sigmoid(), strict=True):
        expected = expected - alpha * torch.outer(u, u)
    torch.testing.assert_close(mixer.dense_matrix(raw), expected)
    raw = _raw(LowRank(5), 3)
    torch.testing.assert_close(LowRank(5).dense_matrix(raw), Householder(5).dense_matrix(raw))


@pytest.mark.parametrize(("channels", "rows", "sides"), [(12, None, (3, 4)), (12, 6, (6, 2)), (7, None, (1, 7))])
def test_kronecker_is_the_product_of_its_factors(channels, rows, sides):
    torch.manual_seed(0)
    mixer = Kronecker(channels, rows, largest=2.0)
    raw = _raw(mixer)
    factors = []
    for part, d in zip(raw.split([d * d + d for d in sides]), sides, strict=True):
        root = torch.eye(d, dtype=torch.double) + part[:-d].reshape(d, d) / d
        scale = torch.diag((part[-d:] - math.log(math.sqrt(2) - 1)).sigmoid().sqrt())
        factors.append(scale @ root @ root.T @ scale / _norm(root @ root.T))
    torch.testing.assert_close(mixer.dense_matrix(raw), 2 * torch.kron(*factors))


def test_a_factor_of_zero_has_a_finite_gradient():
    mixer = Kronecker(7)
    raw = torch.zeros(mixer.raw_channels)
    raw[0] = -1  # the 1 x 1 factor I + raw
    raw.requires_grad_()
    h = mixer.solve(mixer.coefficients(raw), torch.full((7,), 0.5), torch.ones(7))
    h.sum().backward()
    assert h.isfinite().all() and raw.grad.isfinite().all()


def test_monarch_is_a_block_per_column_times_a_block_per_row():
    torch.manual_seed(0)
    mixer = Monarch(6, rows=2)
    q = mixer.coefficients(_raw(mixer))
    identity = torch.eye(6, dtype=torch.double)
    rows, columns = identity, identity
    for i, row in enumerate(torch.arange(6).reshape(2, 3)):
        u = torch.zeros(6, dtype=torch.double).index_put((row,), q.in_rows[i])
        rows = rows - q.row_strengths[i] * torch.outer(u, u)
    for j, column in enumerate(torch.arange(6).reshape(2, 3).T):
        u = torch.zeros(6, dtype=torch.double).index_put((column,), q.in_columns[:, j])
        columns = columns - q.column_strengths[j] * torch.outer(u, u)
    torch.testing.assert_close(mixer.apply(q, identity).T, columns @ rows)


def test_two_projections_reach_the_bound_of_monarch():
    """In the plane at angles whose cosine is sqrt(1/3); as row and column blocks do not share a plane, close to it."""
    torch.manual_seed(0)
    mixer = Monarch(4)
    raw = _raw(mixer, 20000, scale=20.0)
    furthest = _norm(torch.eye(4, dtype=torch.double) - mixer.dense_matrix(raw)).max()
    assert 1.1 < furthest <= 2 / math.sqrt(3) + 1e-12


def test_orthogonal_goes_half_or_all_the_way_to_a_rotation():
    torch.manual_seed(0)
    half, whole = Orthogonal(7).double(), Orthogonal(7, largest=2.0).double()
    whole.load_state_dict(half.state_dict())
    raw, identity = torch.empty(3, 0, dtype=torch.double), torch.eye(7, dtype=torch.double)
    rotation = whole.dense_matrix(raw)[0]
    torch.testing.assert_close(rotation @ rotation.T, identity)
    torch.testing.assert_close(half.dense_matrix(raw)[0], (identity + rotation) / 2)
    assert all(weight.no_weight_decay for weight in half.parameters())


@pytest.mark.parametrize("name", ["Householder 1", "LowRank 1", "Kronecker", "Dense"])
def test_raw_terms_of_zero_are_as_far_from_the_identity_as_from_no_passing(name):
    mixer = FACTORIES[name](12)
    raw = torch.full((mixer.raw_channels,), 1e-5 if name[-1] == "1" else 0.0, dtype=torch.double)
    torch.testing.assert_close(mixer.residual_bound(mixer.coefficients(raw)).item(), 0.5, rtol=1e-5, atol=0)


@pytest.mark.parametrize("mixer", [DenseMixer, FixedPointMixer])
def test_a_mixer_without_raw_terms_works_in_a_sequence_mixer(mixer):
    torch.manual_seed(0)
    sequence_mixer = mixer(6, channel_mixer=Orthogonal)
    y = sequence_mixer(torch.randn(2, 5, 6))
    y.sum().backward()
    assert y.isfinite().all() and sequence_mixer.channel_mixer.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Householder(4, 0), "Householder: rank is 0, must be between 1 and the 4 channels"),
        (lambda: LowRank(4, 5), "LowRank: rank is 5, must be between 1 and the 4 channels"),
        (lambda: Kronecker(8, 3), "Kronecker: rows is 3, must divide the 8 channels"),
        (lambda: Monarch(8, 0), "Monarch: rows is 0, must divide the 8 channels"),
        (lambda: Kronecker(257), "Kronecker: 257 channels as 1 x 257, no side must be over 64"),
        (lambda: Dense(65), "Dense: 65 channels need 4225 numbers per token; it is for at most 64"),
        *[
            (partial(factory, 4, largest=largest), f"largest is {largest}, must be above 0 and at most 2")
            for factory in FACTORIES.values()
            for largest in (0.0, 2.5, math.nan)
        ],
    ],
)
def test_a_bad_option_is_refused_in_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
