"""An MLP and experts in parallel, each with its own norms, as in Gemma 4."""

from dataclasses import dataclass

from torch import Tensor

from molink.stage.decoder.mlp import Mlp
from molink.stage.decoder.norm import Norm


@dataclass(frozen=True, slots=True)
class PairedMlp:
    """Adds the outputs of both, which read the residual rows.

    The router of ``routed`` contains the experts' first norm.
    """

    norm: Norm
    shared: Mlp
    shared_norm: Norm
    routed: Mlp
    routed_norm: Norm

    def __call__(self, rows: Tensor) -> Tensor:
        result = self.shared_norm(self.shared(self.norm(rows)))
        return result + self.routed_norm(self.routed(rows))

    @property
    def capturable(self) -> bool:
        return self.shared.capturable and self.routed.capturable

    @property
    def nbytes(self) -> int:
        parts = (self.norm, self.shared, self.shared_norm, self.routed, self.routed_norm)
        return sum(part.nbytes for part in parts)
