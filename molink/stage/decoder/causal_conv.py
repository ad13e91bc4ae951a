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
        kept, given, rows = states.pool.conv_rows[index], states.rows, rows.float()
        result = torch.empty_like(rows)
        if len(given.single_rows):
            new = rows.index_select(0, given.single_rows).unsqueeze(1)
            window = torch.cat((kept.index_select(0, given.single_slots), new), dim=1)
            result.index_copy_(0, given.single_rows, (window * self.weight).sum(1))
            kept.index_copy_(0, given.single_slots, window[:, 1:])
        for first, count, slot in given.chunks:
            window = torch.cat((kept[slot], rows[first : first + count]))
            part = result[first : first + count]
            torch.mul(window[:count], self.weight[0], out=part)
            for offset in range(1, len(self.weight)):
                part.addcmul_(window[offset : offset + count], self.weight[offset])
            kept[slot] = window[count:]
        return result if self.bias is None else result.add_(self.bias)

    @property
    def nbytes(self) -> int:
        return total_bytes(self.weight, self.bias)


def load_conv(reader: WeightReader, *names: str, biased: bool) -> CausalConv:
    """Load convolutions ``names`` (without ``.weight``, ``[channels, 1, conv_width]``) as one."""

    def read(kind: str) -> Tensor:
        return reader.read_tensors(*(f"{name}.{kind}" for name in names), dtype=torch.float32)

    weight, bias = read("weight"), read("bias") if biased else None
    return CausalConv(weight.squeeze(1).t().contiguous(), bias)
