"""What LLVM's builder lacks: loops that carry values, and the type bfloat16.

Mathematics of 16 float32 at a time, and how they come from bf16 and go back.
"""

import math
from collections.abc import Callable, Sequence

from llvmlite import ir

from molink.stage.kernels.kernel_shape import BF16, LANES

Values = Sequence[ir.Value]

I32, I64 = ir.IntType(32), ir.IntType(64)
BYTE, FLOAT, POINTER, VOID = ir.IntType(8), ir.FloatType(), ir.PointerType(), ir.VoidType()


class BFloat(ir.Type):
    """A float32 without its lower half."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def declare_function(module: ir.Module, name: str, kind: ir.FunctionType) -> ir.Function:
    """The function ``name`` that is somewhere else: an instruction, or in another library."""
    return module.globals.get(name) or ir.Function(module, kind, name)


def begin_function(
    module: ir.Module, name: str, pointers: int, numbers: int
) -> tuple[ir.Function, ir.IRBuilder]:
    """A function of so many pointers, then so many int64, that returns nothing; and its body."""
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
    """``while begin + step <= end: carried = body(begin, carried); begin += step``.

    Returns where it stopped, and what it carried there.
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
    """``pointer`` and so many bytes."""
    return builder.gep(pointer, [nbytes], source_etype=BYTE)


def emit_element_pointer(
    builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, nbytes: int | ir.Value
) -> ir.Value:
    """Where number ``index`` is, of what has ``nbytes`` bytes each."""
    size = I64(nbytes) if isinstance(nbytes, int) else nbytes
    return emit_offset(builder, pointer, builder.mul(index, size))


def emit_minimum(builder: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    """The lesser of two integers."""
    return builder.select(builder.icmp_signed("<", one, other), one, other)


def emit_maximum(builder: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    """The greater of two integers."""
    return builder.select(builder.icmp_signed(">", one, other), one, other)


def emit_alloca(builder: ir.IRBuilder, nbytes: int) -> ir.Value:
    """A pointer to memory of the function itself, aligned for words."""
    place = builder.alloca(ir.ArrayType(I64, -(-nbytes // 8)))
    # llvmlite still gives it a type of its own, which nothing else here would take.
    return builder.inttoptr(builder.ptrtoint(place, I64), POINTER)


def emit_broadcast(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    """A vector whose every lane is ``value``."""
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


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
