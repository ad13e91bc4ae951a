"""Parts of a layer that read the same normed rows; their outputs are added."""

from dataclasses import dataclass, replace

from torch import Tensor

from molink.stage.decoder.mixer import ForwardContext, Mixer
from molink.stage.decoder.mlp import Mlp, run_mlp


@dataclass(frozen=True, slots=True)
class ParallelMixers:
    """Attention and a recurrence in parallel, as in Falcon-H1."""

    attention: Mixer
    recurrent: Mixer

    def __call__(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """See :class:`~molink.stage.decoder.mixer.Mixer`."""
        attended = self.attention(normed, context)
        return self.recurrent(normed, context).add_(attended)

    @property
    def capturable(self) -> bool:
        return self.attention.capturable and self.recurrent.capturable

    @property
    def nbytes(self) -> int:
        return self.attention.nbytes + self.recurrent.nbytes

    def with_index(self, index: int) -> "ParallelMixers":
        """See :class:`~molink.stage.decoder.mixer.Mixer`.

        Both parts get the index, since every layer has both.
        """
        both = self.attention.with_index(index), self.recurrent.with_index(index)
        return ParallelMixers(*both)


@dataclass(frozen=True, slots=True)
class ParallelMlp:
    """A mixer and the layer's MLP in parallel (Cohere's models), or an MLP alone (Nemotron)."""

    mixer: Mixer | None
    mlp: Mlp

    def __call__(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """See :class:`~molink.stage.decoder.mixer.Mixer`.

        For float16 models the MLP's output may be float32, and then so is the sum.
        """
        if self.mixer is None:
            return run_mlp(self.mlp, normed, context.adapters)
        mixed = self.mixer(normed, context)
        return run_mlp(self.mlp, normed, context.adapters).add_(mixed)

    @property
    def capturable(self) -> bool:
        return self.mlp.capturable and (self.mixer is None or self.mixer.capturable)

    @property
    def nbytes(self) -> int:
        return self.mlp.nbytes + (0 if self.mixer is None else self.mixer.nbytes)

    def with_index(self, index: int) -> "ParallelMlp":
        """See :class:`~molink.stage.decoder.mixer.Mixer`."""
        return self if self.mixer is None else replace(self, mixer=self.mixer.with_index(index))
