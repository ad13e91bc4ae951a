"""Projections: a protocol, its implementations, and their choice."""

from molink.stage.linear.base import Projection
from molink.stage.linear.create import Kind, create_projection
from molink.stage.linear.packed import PackedLinear, can_pack
from molink.stage.linear.plain import Linear
from molink.stage.linear.twin import twin_pays

__all__ = [
    "Kind",
    "Linear",
    "PackedLinear",
    "Projection",
    "can_pack",
    "create_projection",
    "twin_pays",
]
