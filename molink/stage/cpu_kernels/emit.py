"""Extends LLVM's builder: loops with carried values, bfloat16, and math on 16 float32."""

import math
from collections.abc import Callable, Sequence

from llvmlite import ir

from molink.stage.cpu_kernels.kernel_shape import BF16, LANES

Values = Sequence[ir.Value]

I32, I64 = ir.IntType(32), ir.IntType(64)
BYTE, FLOAT, POINTER, VOID = ir.IntType(8), ir.FloatType(), ir.PointerType(), ir.VoidType()


class BFloat(ir.Type):
    """The bfloat16 type."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def declare_function(module: ir.Module, name: str, kind: ir.FunctionType) -> ir.Function:
    """Declare an external function or intrinsic."""
    return module.globals.get(name) or ir.Function(module, kind, name)


def begin_function(
    module: ir.Module, name: str, pointers: int, numbers: int
) -> tuple[ir.Function, ir.IRBuilder]:
    """Begin a function of pointers and int64 numbers that returns nothing."""
    function = ir.Function(
        module, ir.FunctionType(VOID, [POINTER] * pointers + [I64] * numbers), name
    )
    return function, ir.IRBuilder(function.append_basic_block())


def emit_loop(
    builder: ir.IRBuilder,
    begin: ir.Value,
    end: ir.Value,
    step: int,
    body: Callable[[ir.Value, Values], Values],
    carried: Values = (),
) -> tuple[ir.Value, Values]:
    """Emit ``while begin + step <= end: carried = body(begin, carried); begin += step``.

    Returns the final index and carried values.
    """
    before = builder.block
    head, inside, after = (builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(begin, before)
    values = [builder.phi(value.type) for value in carried]
    for phi, value in zip(values, carried, strict=True):
        phi.add_incoming(value, before)
    following = builder.add(index, I64(step))
    builder.cbranch(builder.icmp_signed("<=", following, end), inside, after)
    builder.position_at_end(inside)
    results = body(index, values)
    for phi, value in zip(values, results, strict=True):
        phi.add_incoming(value, builder.block)
    index.add_incoming(following, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return index, values


def emit_offset(builder: ir.IRBuilder, pointer: ir.Value, nbytes: ir.Value) -> ir.Value:
    """Add bytes to a pointer."""
    return builder.gep(pointer, [nbytes], source_etype=BYTE)


def emit_element_pointer(
    builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, nbytes: int | ir.Value
) -> ir.Value:
    """Emit a pointer to element ``index`` of ``nbytes`` bytes."""
    size = I64(nbytes) if isinstance(nbytes, int) else nbytes
    return emit_offset(builder, pointer, builder.mul(index, size))


def emit_minimum(builder: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    """Emit the minimum of two integers."""
    return builder.select(builder.icmp_signed("<", one, other), one, other)


def emit_maximum(builder: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    """Emit the maximum of two integers."""
    return builder.select(builder.icmp_signed(">", one, other), one, other)


def emit_alloca(builder: ir.IRBuilder, nbytes: int) -> ir.Value:
    """Allocate stack memory, aligned for words."""
    place = builder.alloca(ir.ArrayType(I64, -(-nbytes // 8)))
    # llvmlite types the pointer, unlike the opaque ones used here.
    return builder.inttoptr(builder.ptrtoint(place, I64), POINTER)


def emit_broadcast(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    """Broadcast ``value`` to all lanes."""
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


FLOATS = ir.VectorType(FLOAT, LANES)
INTEGERS = ir.VectorType(I32, LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)
#: Exponents below which a float32 counts as 0, and above which it is infinite.
_MINIMUM, _MAXIMUM = -126.0, 128.0
#: 2 ** x = Σ (x ln 2)^k / k!
_EXP2_SERIES = [math.log(2) ** term / math.factorial(term) for term in range(7)]


def emit_constant(value: float) -> ir.Constant:
    """Return a constant with a number in all lanes."""
    return ir.Constant(FLOATS, [value] * LANES)


def emit_call(builder: ir.IRBuilder, name: str, *given: ir.Value) -> ir.Value:
    """Call an intrinsic of the first operand's type."""
    kind = ir.FunctionType(given[0].type, [each.type for each in given])
    return builder.call(declare_function(builder.module, name, kind), given)


def emit_reduction(builder: ir.IRBuilder, operation: str, vector: ir.Value) -> ir.Value:
    """Reduce lanes by ``fadd`` or ``fmax``."""
    begun = [FLOAT(-0.0)] if operation == "fadd" else []
    given = [*begun, vector]
    kind = ir.FunctionType(FLOAT, [each.type for each in given])
    name = f"llvm.vector.reduce.{operation}.v{LANES}f32"
    return builder.call(declare_function(builder.module, name, kind), given, fastmath=("reassoc",))


def emit_power_of_two(builder: ir.IRBuilder, given: ir.Value) -> ir.Value:
    """Compute ``2 ** given`` to float32 precision; 0 and infinity beyond the range.

    The integer part becomes the exponent; six series terms approximate the rest, within ±½.
    """
    bounded = emit_call(builder, "llvm.minnum.v16f32", given, emit_constant(_MAXIMUM))
    power = emit_negative_power_of_two(builder, bounded)
    far = builder.fcmp_ordered("<=", given, emit_constant(_MINIMUM))
    return builder.select(far, emit_constant(0.0), power)


def emit_negative_power_of_two(
    builder: ir.IRBuilder, given: ir.Value, terms: int = len(_EXP2_SERIES) - 1
) -> ir.Value:
    """Compute finite ``2 ** given`` with ``terms`` series terms; 2 ** -126 if very small."""
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
    """Load 16 bf16 as float32."""
    numbers = builder.zext(builder.load(pointer, typ=HALVES, align=2), INTEGERS)
    shifted = builder.shl(numbers, ir.Constant(INTEGERS, [16] * LANES))
    return builder.bitcast(shifted, FLOATS)


def emit_store_bf16(builder: ir.IRBuilder, vector: ir.Value, pointer: ir.Value) -> None:
    """Store float32 as bf16."""
    builder.store(builder.fptrunc(vector, ir.VectorType(BFloat(), LANES)), pointer, align=2)


def emit_load(builder: ir.IRBuilder, pointer: ir.Value, element: int) -> ir.Value:
    """Load 16 bf16 or float32, by the ``element`` size, as float32."""
    if element == BF16:
        return emit_load_bf16(builder, pointer)
    return builder.load(pointer, typ=FLOATS, align=element)


def emit_store(builder: ir.IRBuilder, vector: ir.Value, pointer: ir.Value, element: int) -> None:
    """Store as bf16 or float32."""
    if element == BF16:
        emit_store_bf16(builder, vector, pointer)
    else:
        builder.store(vector, pointer, align=element)


def emit_transpose(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Transpose a square of vectors by halves, quarters, …."""
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
