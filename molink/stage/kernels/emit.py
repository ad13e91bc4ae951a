"""What LLVM's builder lacks: loops that carry values, and the type bfloat16."""

from collections.abc import Callable, Sequence

from llvmlite import ir

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
