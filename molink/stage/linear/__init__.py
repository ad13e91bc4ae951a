"""Projections: a protocol, its implementations, and their choice."""

from molink.stage.linear.base import EmbeddingTable, Projection
from molink.stage.linear.blocks import BlockLinear, ConcatenatedLinear
from molink.stage.linear.compiled import CompiledLinear
from molink.stage.linear.create import ProjectionFactory
from molink.stage.linear.packed import PackedLinear, can_pack
from molink.stage.linear.plain import PlainLinear

__all__ = [
    "BlockLinear",
    "CompiledLinear",
    "ConcatenatedLinear",
    "EmbeddingTable",
    "PackedLinear",
    "PlainLinear",
    "Projection",
    "ProjectionFactory",
    "can_pack",
]
