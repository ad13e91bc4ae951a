"""A causal convolution over few rows, whose last rows are part of a request's state."""

from dataclasses import dataclass

import torch
from torch import Tensor

from molink.stage.decoder.mixer import StateContext
from molink.stage.linear.base import total_bytes
from molink.stage.weights.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class CausalConv:
    """A depthwise convolution in float32.

    ``weight`` is float32 ``[conv_width, channels]``, earliest row first; ``bias``, if any, is
    ``[channels]``.
    """

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, rows: Tensor, states: StateContext, index: int) -> Tensor:
        """Convolve rows ``[T, channels]`` with the rows before them, to float32 ``[T, channels]``.

        ``index`` is the layer's index in the state pool, which keeps the last rows.
        """
        kept, rows = states.pool.conv_rows[index], rows.float()
        result = torch.empty_like(rows)
        states.apply_rows(kept, (rows,), result, self._convolve_row, self._convolve_chunk)
        return result if self.bias is None else result.add_(self.bias)

    def _convolve_row(self, kept: Tensor, rows: Tensor) -> Tensor:
        """Convolve a row of each request, ``[B, channels]``, with those ``kept`` before it."""
        window = torch.cat((kept, rows.unsqueeze(1)), dim=1)
        kept.copy_(window[:, 1:])
        return (window * self.weight).sum(1)

    def _convolve_chunk(self, kept: Tensor, rows: Tensor) -> Tensor:
        """Convolve consecutive rows ``[T, channels]`` with those ``kept`` before them."""
        window, count = torch.cat((kept, rows)), len(rows)
        result = window[:count] * self.weight[0]
        for offset in range(1, len(self.weight)):
            result.addcmul_(window[offset : offset + count], self.weight[offset])
        kept.copy_(window[count:])
        return result

    @property
    def nbytes(self) -> int:
        return total_bytes(self.weight, self.bias)


def load_conv(reader: WeightReader, *names: str, biased: bool) -> CausalConv:
    """Load convolutions ``names`` (without ``.weight``, ``[channels, 1, conv_width]``) as one."""

    def read(kind: str) -> Tensor:
        return reader.read_tensors(*(f"{name}.{kind}" for name in names), dtype=torch.float32)

    weight, bias = read("weight"), read("bias") if biased else None
    return CausalConv(weight.squeeze(1).t().contiguous(), bias)
