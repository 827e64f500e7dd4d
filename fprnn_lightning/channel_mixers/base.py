"""A channel mixer is a matrix Q_t on the D channels of one token, known through what it does to vectors.

Its coefficients are a function of `raw_channels` numbers per token, which the sequence mixer projects from the input
and, if wanted, from the previous state. So a channel mixer does not know what its coefficients depend on.

What the fixed point solves for each token is (I - diag(gain) (I - Q)) h = v. Where a mixer has no closed form for it,
the matrix is written out and factorised if it is small; otherwise h <- v + gain * (I - Q) h is iterated until it rests,
with the gradient of the limit. That converges for certain if |gain| ||I - Q|| < 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial, wraps
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from fprnn_lightning.solvers import Stopping, solve
from fprnn_lightning.solvers.gradients import Implicit
from fprnn_lightning.solvers.picard import Picard

LARGEST_FACTORISED = 256  # channels up to which D^3 operations per token cost no more than some hundred iterations
ITERATIONS = 1000
REST = 32  # machine epsilons of relative change that are no change

Coefficients = TypeVar("Coefficients")
Result = TypeVar("Result")


def in_full_precision(method: Callable[..., Result]) -> Callable[..., Result]:
    """A method of coefficients or raw terms whose matrix products keep their dtype under autocast, as states do."""

    @wraps(method)
    def run(self: "ChannelMixer", *arguments) -> Result:
        first = arguments[0] if isinstance(arguments[0], Tensor) else arguments[0][0]
        with torch.autocast(first.device.type, enabled=False):
            return method(self, *arguments)

    return run


class ChannelMixer(nn.Module, ABC, Generic[Coefficients]):
    """A family of D x D matrices Q.

    Args:
        channels: D.
        raw_channels: numbers per token that the coefficients of Q are made from.
        largest: upper end of the range of strengths, or eigenvalues, whose lower end is 0.

    Raises:
        ValueError: if largest is not above 0 and at most 2.
    """

    def __init__(self, channels: int, raw_channels: int, largest: float) -> None:
        if not 0 < largest <= 2:
            raise ValueError(f"{type(self).__name__}: largest is {largest}, must be above 0 and at most 2")
        super().__init__()
        self.channels = channels
        self.raw_channels = raw_channels
        self.largest = largest

    @abstractmethod
    def coefficients(self, raw: Tensor) -> Coefficients:
        """The coefficients of Q from (..., raw_channels)."""

    @abstractmethod
    def residual_apply(self, q: Coefficients, v: Tensor) -> Tensor:
        """(I - Q) v: (..., D) -> (..., D); v may have more leading axes than q."""

    @abstractmethod
    def residual_bound(self, q: Coefficients) -> Tensor:
        """At least ||I - Q||, the largest singular value, of each token: (...,), or () where Q is the same for all."""

    @abstractmethod
    def coefficients_flops(self) -> int:
        """Operations of `coefficients` per token, a multiplication and an addition being two; activations left out."""

    @abstractmethod
    def residual_flops(self) -> int:
        """Operations of `residual_apply` per token."""

    def solve_flops(self) -> int:
        """Operations of `solve` per token; at most, where it iterates or Q is the same for all tokens."""
        if self.channels > LARGEST_FACTORISED:
            return ITERATIONS * (self.residual_flops() + 2 * self.channels)
        written_out = (self.channels + 1) * self.residual_flops()
        return written_out + 2 * self.channels**3 // 3 + 4 * self.channels**2

    def describe(self) -> dict[str, str | int | float]:
        """What tables say of the channel mixer: its name and its settings, if any."""
        return {"channel_mixer": type(self).__name__}

    @in_full_precision
    def solve(self, q: Coefficients, gain: Tensor, v: Tensor) -> Tensor:
        """The h with (I - diag(gain) (I - Q)) h = v: gain and v (..., D) -> (..., D).

        It exists for certain if |gain| ||I - Q|| < 1; where it does not, or is not found, the result is not finite, or
        large near a singular matrix.
        """
        return (self._factorise if self.channels <= LARGEST_FACTORISED else self._iterate)(q, gain, v)

    def _factorise(self, q: Coefficients, gain: Tensor, v: Tensor) -> Tensor:
        """M^-1 v by M = LU. The gradient is that of one Newton step at the solution, dh = M^-1 (dv - dM h).

        It is right once: a second derivative misses how M^-1 changes.
        """
        with torch.no_grad():
            identity = torch.eye(self.channels, dtype=v.dtype, device=v.device)
            columns = identity.reshape(self.channels, *(1,) * (v.dim() - 1), self.channels)
            residual = self.residual_apply(q, columns).movedim(0, -1)  # ... D D
            factors, pivots, _ = torch.linalg.lu_factor_ex(identity - gain[..., None] * residual)
            h = torch.linalg.lu_solve(factors, pivots, v[..., None])[..., 0]
        error = v + gain * self.residual_apply(q, h) - h
        return h + torch.linalg.lu_solve(factors, pivots, error[..., None])[..., 0]

    def _iterate(self, q: Coefficients, gain: Tensor, v: Tensor) -> Tensor:
        def step(h: Tensor) -> Tensor:  # tokens D
            return (v + gain * self.residual_apply(q, h.reshape(v.shape))).reshape(h.shape)

        tolerance = REST * torch.finfo(v.dtype).eps
        find = partial(solve, solver=Picard(), stopping=Stopping(tolerance, share=1.0))
        start = v.reshape(-1, self.channels)
        found = Implicit(ITERATIONS, tolerance).differentiate(find, step, start, ITERATIONS)
        return torch.where(found.converged[:, None], found.value, torch.nan).reshape(v.shape)

    def apply(self, q: Coefficients, v: Tensor) -> Tensor:
        """Q v: (..., D) -> (..., D)."""
        return v - self.residual_apply(q, v)

    def dense_matrix(self, raw: Tensor) -> Tensor:
        """Q itself: (..., raw_channels) -> (..., D, D). For tests: it costs D applications."""
        identity = torch.eye(self.channels, dtype=raw.dtype, device=raw.device)
        q = self.coefficients(raw[..., None, :])
        return self.apply(q, identity.expand(*raw.shape[:-1], -1, -1)).mT
