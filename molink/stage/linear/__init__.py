"""Projections and their choice."""

from molink.stage.linear.base import EmbeddingTable, Projection
from molink.stage.linear.compiled import BlockLinear, CompiledLinear, ConcatenatedLinear
from molink.stage.linear.create import (
    ProjectionFactory,
    has_slow_integers,
    integer_kernel,
    slow_kernels,
)
from molink.stage.linear.dense import PackedLinear, PlainLinear, can_pack
from molink.stage.linear.experts import ExpertLinear
from molink.stage.linear.planes import PlanesLinear

__all__ = [
    "BlockLinear",
    "CompiledLinear",
    "ConcatenatedLinear",
    "EmbeddingTable",
    "ExpertLinear",
    "PackedLinear",
    "PlainLinear",
    "PlanesLinear",
    "Projection",
    "ProjectionFactory",
    "can_pack",
    "has_slow_integers",
    "integer_kernel",
    "slow_kernels",
]
