"""Which kind of projection a weight becomes."""

from typing import Literal

from torch import Tensor

from molink.stage.linear.base import Projection
from molink.stage.linear.packed import PackedLinear
from molink.stage.linear.plain import Linear
from molink.stage.linear.twin import TwinLinear, can_twin

#: ``twin`` is packed, with a second copy of the weights for few rows.
Kind = Literal["plain", "packed", "twin"]


def create_projection(weight: Tensor, bias: Tensor | None, kind: Kind) -> Projection:
    """A projection of ``weight`` ``[out, in]``; see :func:`~molink.stage.linear.packed.can_pack`
    and :func:`~molink.stage.linear.twin.twin_pays` for where the kinds work.
    """
    if kind == "plain":
        return Linear(weight, bias)
    if kind == "twin" and can_twin(weight):
        return TwinLinear(weight, bias)
    return PackedLinear.pack(weight, bias)
