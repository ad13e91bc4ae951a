"""Quantizes rows to 8 bits with a scale per group, for the integer product.

A group of a row is ``scale · q`` with ``scale = peak / 127``. If it has NaN or infinity, its scale
is NaN. Each scale is stored with the sum of the group's ``q``, by which minima and shifts are
multiplied::

    numbers   [rows, groups, 2]    float32
"""

from collections.abc import Sequence

from llvmlite import ir

from molink.stage.cpu_kernels.emit import (
    FLOAT,
    I32,
    I64,
    Values,
    begin_function,
    declare_function,
    emit_broadcast,
    emit_element_pointer,
    emit_loop,
    emit_offset,
)

#: Largest magnitude of a quantized number.
MAX_CODE = 127
#: Bytes of a group's scale and sum.
NUMBER_BYTES = 8
_LANES = 8
_I16 = ir.IntType(16)
#: Groups with smaller peaks become 0.
_MIN_PEAK = 1e-30
_INFINITY_BITS = 0x7F800000
_SIGN_MASK = 0x7FFFFFFF


class RowQuantizer:
    """``quantize(rows, quantized, numbers, groups, begin, end, thread)``: quantizes groups."""

    def __init__(
        self,
        module: ir.Module,
        order: Sequence[int],
        element: int,
        code_bytes: int,
        factor: int | None,
    ) -> None:
        """``order`` is a group's order of codes in memory, ``element`` the bytes of an element.

        Sums are multiplied by ``factor``, or by the scale if ``factor`` is ``None``.
        """
        self._order, self._element, self._factor = order, element, factor
        self._code = ir.IntType(8 * code_bytes)
        self.function, self._builder = begin_function(module, "quantize", pointers=3, numbers=4)
        self._emit()

    def _emit(self) -> None:
        builder = self._builder
        rows, quantized, numbers, _, begin, end, _ = self.function.args
        size = self._code.width // 8

        def emit_group(group: ir.Value, _: Values) -> Values:
            given = emit_element_pointer(builder, rows, group, len(self._order) * self._element)
            target = emit_element_pointer(builder, quantized, group, len(self._order) * size)
            found = emit_element_pointer(builder, numbers, group, NUMBER_BYTES)
            scale, inverse = self._emit_scale(self._find_peak_bits(given))
            total: ir.Value = ir.Constant(ir.VectorType(I32, _LANES), [0] * _LANES)
            run = min(len(self._order), 32)
            for first in range(0, len(self._order), run):
                codes = [
                    self._round_codes(emit_offset(builder, given, I64(at * self._element)), inverse)
                    for at in range(first, first + run, _LANES)
                ]
                for each in codes:
                    total = builder.add(total, each)
                self._store_codes(codes, emit_offset(builder, target, I64(first * size)))
            builder.store(scale, found, align=4)
            kind = ir.FunctionType(I32, [total.type])
            reduce = declare_function(builder.module, "llvm.vector.reduce.add.v8i32", kind)
            whole = builder.sitofp(builder.call(reduce, [total]), FLOAT)
            times = scale if self._factor is None else FLOAT(float(self._factor))
            builder.store(builder.fmul(whole, times), emit_offset(builder, found, I64(4)), align=4)
            return ()

        emit_loop(builder, begin, end, 1, emit_group)
        builder.ret_void()

    def _load_values(self, address: ir.Value) -> ir.Value:
        """Load eight numbers as float32."""
        builder, floats = self._builder, ir.VectorType(FLOAT, _LANES)
        if self._element == 4:
            return builder.load(address, typ=floats, align=4)
        whole = ir.VectorType(I32, _LANES)
        upper = builder.zext(builder.load(address, typ=ir.VectorType(_I16, _LANES), align=2), whole)
        return builder.bitcast(builder.shl(upper, ir.Constant(whole, [16] * _LANES)), floats)

    def _find_peak_bits(self, given: ir.Value) -> ir.Value:
        """Find the largest magnitude's bits, which sort like magnitudes; NaN is largest."""
        builder, whole = self._builder, ir.VectorType(I32, _LANES)
        greatest: ir.Value | None = None
        kind = ir.FunctionType(whole, [whole, whole])
        choose = declare_function(builder.module, "llvm.smax.v8i32", kind)
        for at in range(0, len(self._order), _LANES):
            values = self._load_values(emit_offset(builder, given, I64(at * self._element)))
            mask = ir.Constant(whole, [_SIGN_MASK] * _LANES)
            bits = builder.and_(builder.bitcast(values, whole), mask)
            greatest = bits if greatest is None else builder.call(choose, [greatest, bits])
        kind = ir.FunctionType(I32, [whole])
        reduce = declare_function(builder.module, "llvm.vector.reduce.smax.v8i32", kind)
        return builder.call(reduce, [greatest])

    def _emit_scale(self, bits: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Compute a group's scale from its peak, and the factor to its codes in all lanes."""
        builder = self._builder
        finite = builder.icmp_signed("<", bits, I32(_INFINITY_BITS))
        peak, most = builder.bitcast(bits, FLOAT), FLOAT(float(MAX_CODE))
        scale = builder.select(finite, builder.fdiv(peak, most), FLOAT(float("nan")))
        large = builder.fcmp_ordered(">=", peak, FLOAT(_MIN_PEAK))
        inverse = builder.select(builder.and_(large, finite), builder.fdiv(most, peak), FLOAT(0.0))
        return scale, emit_broadcast(builder, inverse, _LANES)

    def _round_codes(self, address: ir.Value, inverse: ir.Value) -> ir.Value:
        """Round eight numbers to 32-bit codes, halves to even."""
        builder = self._builder
        scaled = builder.fmul(self._load_values(address), inverse)
        kind = ir.FunctionType(ir.VectorType(I32, _LANES), [scaled.type])
        # This is defined for NaN, unlike LLVM's conversion.
        convert = declare_function(builder.module, "llvm.x86.avx.cvt.ps2dq.256", kind)
        return builder.call(convert, [scaled])

    def _store_codes(self, codes: Values, address: ir.Value) -> None:
        """Store a run of codes."""
        builder = self._builder
        while len(codes) > 1:
            both = list(range(2 * codes[0].type.count))
            order = ir.Constant(ir.VectorType(I32, len(both)), both)
            codes = [
                builder.shuffle_vector(codes[at], codes[at + 1], order)
                for at in range(0, len(codes), 2)
            ]
        count = codes[0].type.count
        whole = builder.trunc(codes[0], ir.VectorType(self._code, count))
        order = ir.Constant(ir.VectorType(I32, count), self._order[:count])
        builder.store(builder.shuffle_vector(whole, whole, order), address, align=1)
