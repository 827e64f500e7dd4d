"""A causal convolution over time, one filter a channel, with SiLU: what Mamba does to the input of its recurrence.

Source: Mamba (arXiv 2312.00752), figure 3.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fprnn_lightning.scan.context_parallel import tokens_before


class CausalConvolution(nn.Module):
    """y_t = SiLU( bias + sum_k filter_k * x_{t-K+1+k} ) over the last K tokens, with x = 0 before the first.

    Args:
        channels: D.
        tokens: K, how many tokens each output sees, its own among them.
    """

    def __init__(self, channels: int, tokens: int) -> None:
        super().__init__()
        self.before = tokens - 1
        self.filters = nn.Conv1d(channels, channels, tokens, groups=channels)

    def forward(self, x: Tensor, window: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x (B, T, D), after the tokens of a window (B, tokens - 1, D) -> (B, T, D), and the next window.

        Without a window, x is a whole sequence, or a slice of one within `context_parallel`.
        """
        if window is None:
            window = tokens_before(x, self.before)
        x = torch.cat([window.to(x.dtype), x], 1)
        return functional.silu(self._filtered(x)), x[:, x.shape[1] - self.before :]

    def _filtered(self, x: Tensor) -> Tensor:
        """The filters over windows (B, tokens - 1 + T, D) -> (B, T, D)."""
        if not torch.compiler.is_compiling():
            return self.filters(x.mT).mT
        time = x.shape[1] - self.before  # compiled, a convolution's gradient would be for one length only
        taps = (x[:, k : k + time] * tap for k, tap in enumerate(self.filters.weight[:, 0].unbind(-1)))
        return (sum(taps) + self.filters.bias).to(x.dtype)
