"""Mathematics of 16 float32 at a time, and how they come from bf16 and go back."""

import math

from llvmlite import ir

from molink.stage.kernels.emit import FLOAT, I32, BFloat, declare_function
from molink.stage.kernels.kernel_shape import BF16, LANES

FLOATS = ir.VectorType(FLOAT, LANES)
INTEGERS = ir.VectorType(I32, LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)
#: A power of two below which a float32 is as good as 0, and one above which it is infinite.
_MINIMUM, _MAXIMUM = -126.0, 128.0
#: 2 ** x = Σ (x ln 2)^k / k!
_EXP2_SERIES = [math.log(2) ** term / math.factorial(term) for term in range(7)]


def emit_constant(value: float) -> ir.Constant:
    """``value`` in each lane."""
    return ir.Constant(FLOATS, [value] * LANES)


def emit_call(builder: ir.IRBuilder, name: str, *given: ir.Value) -> ir.Value:
    """An instruction of LLVM's that gives what its first operand is."""
    kind = ir.FunctionType(given[0].type, [each.type for each in given])
    return builder.call(declare_function(builder.module, name, kind), given)


def emit_reduction(builder: ir.IRBuilder, operation: str, vector: ir.Value) -> ir.Value:
    """The ``fadd`` or ``fmax`` of all lanes."""
    begun = [FLOAT(-0.0)] if operation == "fadd" else []
    given = [*begun, vector]
    kind = ir.FunctionType(FLOAT, [each.type for each in given])
    name = f"llvm.vector.reduce.{operation}.v{LANES}f32"
    return builder.call(declare_function(builder.module, name, kind), given, fastmath=("reassoc",))


def emit_power_of_two(builder: ir.IRBuilder, given: ir.Value) -> ir.Value:
    """``2 ** given`` to float32's precision; 0 far below, infinite far above.

    The whole part goes into the exponent; of the rest, within ±½, six terms of the series.
    """
    bounded = emit_call(builder, "llvm.minnum.v16f32", given, emit_constant(_MAXIMUM))
    power = emit_negative_power_of_two(builder, bounded)
    far = builder.fcmp_ordered("<=", given, emit_constant(_MINIMUM))
    return builder.select(far, emit_constant(0.0), power)


def emit_negative_power_of_two(
    builder: ir.IRBuilder, given: ir.Value, terms: int = len(_EXP2_SERIES) - 1
) -> ir.Value:
    """``2 ** given``, where that is finite, by so many ``terms``; 2 ** -126 far below."""
    bounded = emit_call(builder, "llvm.maxnum.v16f32", given, emit_constant(_MINIMUM))
    whole = emit_call(builder, "llvm.roundeven.v16f32", bounded)
    rest = builder.fsub(bounded, whole)
    value: ir.Value = emit_constant(_EXP2_SERIES[terms])
    for term in reversed(_EXP2_SERIES[:terms]):
        value = emit_call(builder, "llvm.fma.v16f32", value, rest, emit_constant(term))
    shift = ir.Constant(INTEGERS, [23] * LANES)
    exponent = builder.shl(builder.fptosi(whole, INTEGERS), shift)
    return builder.bitcast(builder.add(builder.bitcast(value, INTEGERS), exponent), FLOATS)


def emit_load_bf16(builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
    """16 bf16 from memory, as float32."""
    numbers = builder.zext(builder.load(pointer, typ=HALVES, align=2), INTEGERS)
    shifted = builder.shl(numbers, ir.Constant(INTEGERS, [16] * LANES))
    return builder.bitcast(shifted, FLOATS)


def emit_store_bf16(builder: ir.IRBuilder, vector: ir.Value, pointer: ir.Value) -> None:
    """To memory as bf16."""
    builder.store(builder.fptrunc(vector, ir.VectorType(BFloat(), LANES)), pointer, align=2)


def emit_load(builder: ir.IRBuilder, pointer: ir.Value, element: int) -> ir.Value:
    """16 numbers from memory, bf16 or float32 by the size of an ``element``, as float32."""
    if element == BF16:
        return emit_load_bf16(builder, pointer)
    return builder.load(pointer, typ=FLOATS, align=element)


def emit_store(builder: ir.IRBuilder, vector: ir.Value, pointer: ir.Value, element: int) -> None:
    """To memory as bf16 or float32."""
    if element == BF16:
        emit_store_bf16(builder, vector, pointer)
    else:
        builder.store(vector, pointer, align=element)


def emit_transpose(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """As many vectors as they have lanes, rows and columns exchanged: by halves, quarters, …."""
    count = len(rows)
    step = 1
    while step < count:
        low = [lane if not lane & step else count + lane - step for lane in range(count)]
        high = [lane + step if not lane & step else count + lane for lane in range(count)]
        masks = [ir.Constant(ir.VectorType(I32, count), order) for order in (low, high)]
        for first in range(count):
            if not first & step:
                pair = rows[first], rows[first + step]
                rows[first], rows[first + step] = (
                    builder.shuffle_vector(*pair, mask) for mask in masks
                )
        step *= 2
    return rows
