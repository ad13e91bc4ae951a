"""What a query's scores weigh: a softmax that goes on from the positions before.

After Dao, "FlashAttention-2" (2023), section 3.1: with each *span* of positions the greatest score
so far is known, and what was summed up by a lesser one is made smaller once.
"""

import math
from dataclasses import dataclass

from llvmlite import ir

from molink.stage.kernels.arithmetic import Arithmetic
from molink.stage.kernels.emit import FLOAT, I32, I64, Values, emit_loop, emit_nth, emit_spread
from molink.stage.kernels.shape import BF16, F32, LANES, AttendShape
from molink.stage.kernels.vectors import (
    FLOATS,
    INTEGERS,
    emit_call,
    emit_constant,
    emit_negative_power_of_two,
    emit_power_of_two,
    emit_reduced,
    emit_rounded,
)

#: Below all scores, and still finite by any factor.
MINIMUM = -1.0e30
_LOG2_E = math.log2(math.e)
#: Terms of a power's series, by the bytes of a weight: more are lost when it is rounded.
_TERMS = {BF16: 4, F32: 6}


@dataclass(frozen=True, slots=True)
class Query:
    """Where a query's numbers are: ``scores`` of a span, and what is kept of those before."""

    scores: ir.Value
    greatest: ir.Value
    sums: ir.Value
    totals: ir.Value


#: The first and the last position of a span that a query sees (int32).
Seen = tuple[ir.Value, ir.Value]


class Softmax:
    """Emits code for one shape."""

    __slots__ = ("_arithmetic", "_builder", "_shape")

    def __init__(self, builder: ir.IRBuilder, shape: AttendShape, arithmetic: Arithmetic) -> None:
        self._builder, self._shape, self._arithmetic = builder, shape, arithmetic

    @property
    def _factor(self) -> ir.Constant:
        """Scores by it are exponents of two; with a softcap they are bounded before."""
        return emit_constant(_LOG2_E * (1.0 if self._shape.softcap else self._shape.scale))

    def begin(self, query: Query) -> None:
        """Nothing was seen yet."""
        builder, zero = self._builder, emit_constant(0.0)
        builder.store(FLOAT(MINIMUM), query.greatest, align=4)
        builder.store(FLOAT(0.0), query.sums, align=4)
        for column in range(0, self._shape.head_dim, LANES):
            builder.store(zero, emit_nth(builder, query.totals, I64(column), F32), align=4)

    def weigh(self, query: Query, vectors: ir.Value, seen: Seen | None) -> None:
        """Put weights in the place of scores, and make what was summed up before smaller.

        Without ``seen`` it sees all.
        """
        builder = self._builder
        old = self._spread(query.greatest)
        found = self._bounded(query, vectors, old, seen)
        new = emit_spread(builder, emit_reduced(builder, "fmax", found), LANES)
        builder.store(builder.extract_element(new, I32(0)), query.greatest, align=4)
        factor, terms = self._factor, _TERMS[self._arithmetic.element]
        below = builder.fneg(builder.fmul(new, factor))

        def emit_power(score: ir.Value) -> ir.Value:
            exponent = emit_call(builder, "llvm.fma.v16f32", score, factor, below)
            return emit_negative_power_of_two(builder, exponent, terms)

        def emit_weight(vector: ir.Value, carried: Values) -> Values:
            weight = emit_power(self._load(query.scores, vector))
            place = emit_nth(builder, query.scores, vector, LANES * self._arithmetic.element)
            self._store(weight, place)
            return (builder.fadd(carried[0], weight),)

        _, (sums,) = emit_loop(builder, I64(0), vectors, 1, emit_weight, (emit_constant(0.0),))
        smaller = emit_power(old)
        share = builder.extract_element(smaller, I32(0))
        kept = builder.fmul(builder.load(query.sums, typ=FLOAT, align=4), share)
        total = builder.fadd(kept, emit_reduced(builder, "fadd", sums))
        builder.store(total, query.sums, align=4)
        for column in range(0, self._shape.head_dim, LANES):
            place = emit_nth(builder, query.totals, I64(column), F32)
            before = builder.load(place, typ=FLOATS, align=4)
            builder.store(builder.fmul(before, smaller), place, align=4)

    def finish(self, query: Query, sink: ir.Value | None, result: ir.Value) -> None:
        """Divide by the sum of the weights, of which ``sink`` (a score) has its share."""
        builder = self._builder
        total = self._spread(query.sums)
        if sink is not None:
            greatest = builder.fmul(self._spread(query.greatest), self._factor)
            own = builder.fmul(emit_spread(builder, sink, LANES), emit_constant(_LOG2_E))
            total = builder.fadd(total, emit_power_of_two(builder, builder.fsub(own, greatest)))
        share = builder.fdiv(emit_constant(1.0), total)
        for column in range(0, self._shape.head_dim, LANES):
            given = builder.load(
                emit_nth(builder, query.totals, I64(column), F32), typ=FLOATS, align=4
            )
            place = emit_nth(builder, result, I64(column), self._arithmetic.element)
            self._store(builder.fmul(given, share), place)

    def _bounded(
        self, query: Query, vectors: ir.Value, old: ir.Value, seen: Seen | None
    ) -> ir.Value:
        """The greatest scores; those that are capped, or hidden, are put in their places."""
        builder, softcap = self._builder, self._shape.softcap
        ends = [emit_spread(builder, each, LANES) for each in seen or ()]

        def emit_greatest(vector: ir.Value, carried: Values) -> Values:
            score = self._load(query.scores, vector)
            if softcap:
                score = self._capped(score)
            if ends:
                begin = builder.trunc(builder.mul(vector, I64(LANES)), I32)
                lanes = ir.Constant(INTEGERS, list(range(LANES)))
                numbers = builder.add(emit_spread(builder, begin, LANES), lanes)
                inside = builder.and_(
                    builder.icmp_signed(">=", numbers, ends[0]),
                    builder.icmp_signed("<=", numbers, ends[1]),
                )
                score = builder.select(inside, score, emit_constant(MINIMUM))
            if softcap or ends:
                builder.store(score, emit_nth(builder, query.scores, vector, LANES * F32), align=4)
            return (emit_call(builder, "llvm.maxnum.v16f32", carried[0], score),)

        return emit_loop(builder, I64(0), vectors, 1, emit_greatest, (old,))[1][0]

    def _capped(self, score: ir.Value) -> ir.Value:
        """``softcap * tanh(scale * score / softcap)``; tanh(x) is 1 - 2 / (exp(2x) + 1)."""
        builder, shape = self._builder, self._shape
        twice = 2 * _LOG2_E * shape.scale / shape.softcap
        power = emit_power_of_two(builder, builder.fmul(score, emit_constant(twice)))
        share = builder.fdiv(
            emit_constant(-2 * shape.softcap), builder.fadd(power, emit_constant(1.0))
        )
        return builder.fadd(share, emit_constant(shape.softcap))

    def _store(self, vector: ir.Value, place: ir.Value) -> None:
        """16 numbers as elements of rows."""
        if self._arithmetic.element == BF16:
            emit_rounded(self._builder, vector, place)
        else:
            self._builder.store(vector, place, align=4)

    def _load(self, scores: ir.Value, vector: ir.Value) -> ir.Value:
        place = emit_nth(self._builder, scores, vector, LANES * F32)
        return self._builder.load(place, typ=FLOATS, align=4)

    def _spread(self, place: ir.Value) -> ir.Value:
        return emit_spread(self._builder, self._builder.load(place, typ=FLOAT, align=4), LANES)
