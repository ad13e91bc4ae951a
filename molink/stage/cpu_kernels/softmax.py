"""Emits an online softmax over spans of positions.

After Dao, "FlashAttention-2" (2023), section 3.1: each span updates the running maximum, and
earlier sums are rescaled once.
"""

import math
from dataclasses import dataclass

from llvmlite import ir

from molink.stage.cpu_kernels.arithmetic import Arithmetic
from molink.stage.cpu_kernels.emit import (
    FLOAT,
    FLOATS,
    I32,
    I64,
    INTEGERS,
    Values,
    emit_broadcast,
    emit_call,
    emit_constant,
    emit_element_pointer,
    emit_loop,
    emit_negative_power_of_two,
    emit_power_of_two,
    emit_reduction,
    emit_store_bf16,
)
from molink.stage.cpu_kernels.kernel_shape import BF16, F32, LANES, AttentionKernelShape

#: Below all scores, and still finite after scaling.
MIN_SCORE = -1.0e30
_LOG2_E = math.log2(math.e)
#: Series terms by the bytes of a weight, whose rounding hides further terms.
_SERIES_TERMS = {BF16: 4, F32: 6}


@dataclass(frozen=True, slots=True)
class QueryState:
    """Pointers to a query's state: ``scores`` of a span, and running maximum, sum and totals."""

    scores: ir.Value
    maximum: ir.Value
    sums: ir.Value
    totals: ir.Value


#: First and last position of a span that a query sees (int32).
VisibleRange = tuple[ir.Value, ir.Value]


class SoftmaxEmitter:
    """Emits softmax code for one shape."""

    def __init__(
        self, builder: ir.IRBuilder, shape: AttentionKernelShape, arithmetic: Arithmetic
    ) -> None:
        self._builder, self._shape, self._arithmetic = builder, shape, arithmetic

    @property
    def _factor(self) -> ir.Constant:
        """Converts scores to exponents of two; soft-capped scores are converted before."""
        return emit_constant(_LOG2_E * (1.0 if self._shape.softcap else self._shape.scale))

    def init_query(self, query: QueryState) -> None:
        """Initialize a query's state."""
        builder, zero = self._builder, emit_constant(0.0)
        builder.store(FLOAT(MIN_SCORE), query.maximum, align=4)
        builder.store(FLOAT(0.0), query.sums, align=4)
        for column in range(0, self._shape.head_dim, LANES):
            builder.store(
                zero, emit_element_pointer(builder, query.totals, I64(column), F32), align=4
            )

    def apply_weights(
        self, query: QueryState, vectors: ir.Value, seen: VisibleRange | None
    ) -> None:
        """Replace scores by weights, and rescale earlier sums.

        Without ``seen`` all positions are visible.
        """
        builder = self._builder
        old = self._broadcast_value(query.maximum)
        found = self._bound_scores(query, vectors, old, seen)
        new = emit_broadcast(builder, emit_reduction(builder, "fmax", found), LANES)
        builder.store(builder.extract_element(new, I32(0)), query.maximum, align=4)
        factor, terms = self._factor, _SERIES_TERMS[self._arithmetic.element]
        below = builder.fneg(builder.fmul(new, factor))

        def emit_weight(vector: ir.Value, carried: Values) -> Values:
            score = self._load_vector(query.scores, vector)
            exponent = emit_call(builder, "llvm.fma.v16f32", score, factor, below)
            weight = emit_negative_power_of_two(builder, exponent, terms)
            address = emit_element_pointer(
                builder, query.scores, vector, LANES * self._arithmetic.element
            )
            self._store_vector(weight, address)
            return (builder.fadd(carried[0], weight),)

        _, (sums,) = emit_loop(builder, I64(0), vectors, 1, emit_weight, (emit_constant(0.0),))
        # Exactly 1 if the maximum stays: spans that a query doesn't see change nothing.
        exponent = builder.fadd(builder.fmul(old, factor), below)
        smaller = emit_negative_power_of_two(builder, exponent, terms)
        share = builder.extract_element(smaller, I32(0))
        kept = builder.fmul(builder.load(query.sums, typ=FLOAT, align=4), share)
        total = builder.fadd(kept, emit_reduction(builder, "fadd", sums))
        builder.store(total, query.sums, align=4)
        for column in range(0, self._shape.head_dim, LANES):
            address = emit_element_pointer(builder, query.totals, I64(column), F32)
            before = builder.load(address, typ=FLOATS, align=4)
            builder.store(builder.fmul(before, smaller), address, align=4)

    def store_result(self, query: QueryState, sink: ir.Value | None, result: ir.Value) -> None:
        """Divide by the sum of weights, including ``sink``."""
        builder = self._builder
        total = self._broadcast_value(query.sums)
        if sink is not None:
            greatest = builder.fmul(self._broadcast_value(query.maximum), self._factor)
            own = builder.fmul(emit_broadcast(builder, sink, LANES), emit_constant(_LOG2_E))
            total = builder.fadd(total, emit_power_of_two(builder, builder.fsub(own, greatest)))
        share = builder.fdiv(emit_constant(1.0), total)
        for column in range(0, self._shape.head_dim, LANES):
            given = builder.load(
                emit_element_pointer(builder, query.totals, I64(column), F32), typ=FLOATS, align=4
            )
            address = emit_element_pointer(builder, result, I64(column), self._arithmetic.element)
            self._store_vector(builder.fmul(given, share), address)

    def _bound_scores(
        self, query: QueryState, vectors: ir.Value, old: ir.Value, seen: VisibleRange | None
    ) -> ir.Value:
        """Compute the maximum of scores; store capped or masked scores back."""
        builder, softcap = self._builder, self._shape.softcap
        ends = [emit_broadcast(builder, each, LANES) for each in seen or ()]

        def emit_greatest(vector: ir.Value, carried: Values) -> Values:
            score = self._load_vector(query.scores, vector)
            if softcap:
                score = self._cap_score(score)
            if ends:
                begin = builder.trunc(builder.mul(vector, I64(LANES)), I32)
                lanes = ir.Constant(INTEGERS, list(range(LANES)))
                numbers = builder.add(emit_broadcast(builder, begin, LANES), lanes)
                inside = builder.and_(
                    builder.icmp_signed(">=", numbers, ends[0]),
                    builder.icmp_signed("<=", numbers, ends[1]),
                )
                score = builder.select(inside, score, emit_constant(MIN_SCORE))
            if softcap or ends:
                builder.store(
                    score, emit_element_pointer(builder, query.scores, vector, LANES * F32), align=4
                )
            return (emit_call(builder, "llvm.maxnum.v16f32", carried[0], score),)

        return emit_loop(builder, I64(0), vectors, 1, emit_greatest, (old,))[1][0]

    def _cap_score(self, score: ir.Value) -> ir.Value:
        """Compute ``softcap * tanh(scale * score / softcap)``; tanh(x) is 1 - 2 / (exp(2x) + 1)."""
        builder, shape = self._builder, self._shape
        twice = 2 * _LOG2_E * shape.scale / shape.softcap
        power = emit_power_of_two(builder, builder.fmul(score, emit_constant(twice)))
        share = builder.fdiv(
            emit_constant(-2 * shape.softcap), builder.fadd(power, emit_constant(1.0))
        )
        return builder.fadd(share, emit_constant(shape.softcap))

    def _store_vector(self, vector: ir.Value, address: ir.Value) -> None:
        """Store 16 numbers as row elements."""
        if self._arithmetic.element == BF16:
            emit_store_bf16(self._builder, vector, address)
        else:
            self._builder.store(vector, address, align=4)

    def _load_vector(self, scores: ir.Value, vector: ir.Value) -> ir.Value:
        address = emit_element_pointer(self._builder, scores, vector, LANES * F32)
        return self._builder.load(address, typ=FLOATS, align=4)

    def _broadcast_value(self, address: ir.Value) -> ir.Value:
        return emit_broadcast(self._builder, self._builder.load(address, typ=FLOAT, align=4), LANES)
