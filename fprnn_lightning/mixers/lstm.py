"""The LSTM (Hochreiter and Schmidhuber 1997): the non-linear dense baseline that solves state-tracking tasks."""

import torch
from torch import Tensor, nn

from fprnn_lightning.mixers.base import Cost, SequenceMixer, inner_width
from fprnn_lightning.scan.context_parallel import require_whole_sequences


class LSTMMixer(SequenceMixer):
    """One layer of torch's LSTM between no input and one output projection.

    Args:
        width: channels of the input and of the output.
        expand: hidden channels per channel of `width`.
    """

    def __init__(self, width: int, expand: float = 2.0) -> None:
        super().__init__(width)
        self.lstm = nn.LSTM(width, inner_width(width, expand), batch_first=True)
        self.output_projection = nn.Linear(self.lstm.hidden_size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.prefill(x)[0]

    def prefill(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        require_whole_sequences("LSTMMixer")
        with torch.autocast(x.device.type, enabled=False):  # the state is carried in full precision
            hidden, state = self.lstm(x.to(self.output_projection.weight.dtype))
        return self.output_projection(hidden), state

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        zeros = self.output_projection.weight.new_zeros(1, batch, self.lstm.hidden_size)
        return zeros, torch.zeros_like(zeros)

    def cost(self, time: int) -> Cost:
        hidden = self.lstm.hidden_size
        return Cost(once=2 * (4 * hidden * (self.width + hidden) + hidden * self.width))

    def step(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        with torch.autocast(x.device.type, enabled=False):
            hidden, state = self.lstm(x[:, None].to(self.output_projection.weight.dtype), state)
        return self.output_projection(hidden[:, 0]), state
