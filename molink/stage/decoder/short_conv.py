"""A layer with a gated convolution over few rows instead of attention (LFM2)."""

from dataclasses import dataclass

from torch import Tensor

from molink.checkpoint.recurrent import ShortConvShape
from molink.stage.decoder.causal_conv import CausalConv, load_conv
from molink.stage.decoder.mixer import ForwardContext, RecurrentMixer
from molink.stage.linear import Projection
from molink.stage.weights.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class ShortConv(RecurrentMixer):
    """Weights of such a layer; ``rows`` projects to both gates and to the convolution's input."""

    rows: Projection
    conv: CausalConv
    output: Projection

    def __call__(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """See :class:`~molink.stage.decoder.mixer.Mixer`."""
        before, after, rows = self.rows(normed).chunk(3, dim=1)
        states = context.require_states()
        (given,) = states.keep_inputs(self.index, before * rows)
        convolved = self.conv(given, states, self.index)[: len(normed)]
        return self.output(after * convolved.to(normed.dtype))

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.conv.nbytes + self.output.nbytes


def load_short_conv(
    reader: WeightReader, shape: ShortConvShape, layer: int, index: int
) -> ShortConv:
    """Load the model's layer ``layer``, which has index ``index`` in the stage's state pool."""
    prefix, biased = f"model.layers.{layer}.", shape.is_biased
    return ShortConv(
        index=index,
        rows=reader.load_projection([prefix + name for name in shape.projections], biased),
        conv=load_conv(reader, f"{prefix}conv.conv", biased=biased),
        output=reader.load_projection([prefix + shape.output_projection[0]], biased),
    )
