"""Projections and their choice."""

from molink.stage.linear.adapted import (
    AdaptedLinear,
    AdapterRows,
    LowRankUpdate,
    apply_projection,
    group_by_adapter,
)
from molink.stage.linear.base import EmbeddingTable, Projection
from molink.stage.linear.block_experts import BlockExperts
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
    "AdaptedLinear",
    "AdapterRows",
    "BlockExperts",
    "BlockLinear",
    "CompiledLinear",
    "ConcatenatedLinear",
    "EmbeddingTable",
    "ExpertLinear",
    "LowRankUpdate",
    "PackedLinear",
    "PlainLinear",
    "PlanesLinear",
    "Projection",
    "ProjectionFactory",
    "apply_projection",
    "can_pack",
    "group_by_adapter",
    "has_slow_integers",
    "integer_kernel",
    "slow_kernels",
]
