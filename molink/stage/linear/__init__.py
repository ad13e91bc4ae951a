"""Projections: a protocol, its implementations, and their choice."""

from molink.stage.linear.base import EmbeddingTable, Projection
from molink.stage.linear.blocks import BlockLinear, SideBySide
from molink.stage.linear.compiled import CompiledLinear
from molink.stage.linear.create import Projections
from molink.stage.linear.packed import PackedLinear, can_pack
from molink.stage.linear.plain import Linear

__all__ = [
    "BlockLinear",
    "CompiledLinear",
    "EmbeddingTable",
    "Linear",
    "PackedLinear",
    "Projection",
    "Projections",
    "SideBySide",
    "can_pack",
]
