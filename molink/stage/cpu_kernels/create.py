"""Creates kernels for this CPU. LLVM is imported late, since GPUs don't need it."""

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.nn.functional import gelu, rms_norm, silu

from molink.checkpoint.traits import Activation
from molink.gguf.block_formats import BlockFormat
from molink.stage.cpu_kernels.kernel_shape import AttentionKernelShape
from molink.stage.cpu_kernels.repack import bound_steps, packed_scales, unpack_rows

if TYPE_CHECKING:
    from molink.stage.cpu_kernels.arithmetic import Arithmetic
    from molink.stage.cpu_kernels.attention_kernel import AttentionKernel
    from molink.stage.cpu_kernels.block_integers import IntegerBlockMatMul
    from molink.stage.cpu_kernels.block_matmul import BlockMatMul
    from molink.stage.cpu_kernels.integer_dots import IntegerInstructions
    from molink.stage.cpu_kernels.matmul import MatMul
    from molink.stage.cpu_kernels.openmp import OpenMp
    from molink.stage.cpu_kernels.rowwise import RowwiseKernels

log = logging.getLogger(__name__)

T = TypeVar("T")


@cache
def create_matmul(
    dtype: torch.dtype,
    threads: int,
    weight_dtype: torch.dtype = torch.bfloat16,
    checked: bool = True,
) -> "MatMul | None":
    """Create a product of 16-bit ``weight_dtype`` weights and rows of ``dtype``.

    Like all functions here, it returns ``None`` if the CPU or system is unsupported, or if results
    differ from torch's, unless the caller does the check (``checked=False``).
    """

    def compile_it(features: Mapping[str, bool], openmp: "OpenMp | None") -> "MatMul | None":
        from molink.stage.cpu_kernels.matmul import MatMul

        arithmetic = _choose_arithmetic(dtype, features, weight_dtype)
        return None if arithmetic is None else MatMul(arithmetic, openmp, threads)

    return _try_compile(compile_it, threads, _is_matmul_correct if checked else _assume_correct)


@cache
def create_block_matmul(
    form: BlockFormat, dtype: torch.dtype, threads: int, checked: bool = True
) -> "BlockMatMul | None":
    """Create a product with quantized weights, for rows of ``dtype`` or float32."""

    def compile_it(features: Mapping[str, bool], openmp: "OpenMp | None") -> "BlockMatMul | None":
        from molink.stage.cpu_kernels.block_matmul import BlockMatMul

        arithmetic = _choose_block_arithmetic(dtype, features)
        return None if arithmetic is None else BlockMatMul(form, arithmetic, openmp, threads)

    return _try_compile(compile_it, threads, _is_unpacking_correct if checked else _assume_correct)


@cache
def create_integer_matmul(
    form: BlockFormat, dtype: torch.dtype, threads: int, checked: bool = True
) -> "IntegerBlockMatMul | None":
    """Create a product with quantized weights and rows in 8 bits."""

    def compile_it(
        features: Mapping[str, bool], openmp: "OpenMp | None"
    ) -> "IntegerBlockMatMul | None":
        from molink.stage.cpu_kernels.block_integers import IntegerBlockMatMul

        arithmetic = _choose_block_arithmetic(dtype, features)
        if arithmetic is None:
            return None
        instructions = _choose_integers(arithmetic.lanes, features)
        if instructions is None:
            return None
        return IntegerBlockMatMul(form, arithmetic, instructions, openmp, threads)

    return _try_compile(compile_it, threads, _is_unpacking_correct if checked else _assume_correct)


def supports_block_weights() -> bool:
    """Whether this CPU supports products with quantized weights."""
    try:
        from molink.stage.cpu_kernels.compiler import host_features
    except (ImportError, OSError, RuntimeError):
        return False
    features = host_features()
    return all(features.get(name) for name in ("avx2", "fma", "f16c"))


@cache
def create_attention_kernel(
    shape: AttentionKernelShape, dtype: torch.dtype, threads: int
) -> "AttentionKernel | None":
    """Create attention for rows, keys and values of ``dtype``; the backend checks it."""

    def compile_it(
        features: Mapping[str, bool], openmp: "OpenMp | None"
    ) -> "AttentionKernel | None":
        from molink.stage.cpu_kernels.attention_kernel import AttentionKernel

        arithmetic = _choose_same_dtype(dtype, features) if shape.is_supported else None
        return None if arithmetic is None else AttentionKernel(shape, arithmetic, openmp, threads)

    return _try_compile(compile_it, threads, _assume_correct)


@cache
def create_rowwise(
    dtype: torch.dtype, eps: float, activation: Activation, threads: int, checked: bool = True
) -> "RowwiseKernels | None":
    """Create norms, activations and rotations for rows of ``dtype``."""

    def compile_it(
        features: Mapping[str, bool], openmp: "OpenMp | None"
    ) -> "RowwiseKernels | None":
        from molink.stage.cpu_kernels.rowwise import RowwiseKernels

        fits = _choose_arithmetic(dtype, features) is not None
        return RowwiseKernels(dtype, eps, activation, openmp, threads) if fits else None

    def is_right(made: "RowwiseKernels") -> bool:
        return (
            _is_norm_correct(made, eps)
            and _is_head_norm_correct(made, eps)
            and _is_gate_correct(made, activation)
            and _is_rotation_correct(made)
        )

    return _try_compile(compile_it, threads, is_right if checked else _assume_correct)


def _try_compile(
    compile_it: "Callable[[Mapping[str, bool], OpenMp | None], T | None]",
    threads: int,
    is_right: Callable[[T], bool],
) -> T | None:
    """Compile for this CPU's features and torch's threads."""
    try:
        from molink.stage.cpu_kernels.compiler import host_features
        from molink.stage.cpu_kernels.openmp import OpenMp

        openmp = OpenMp.find_loaded() if threads > 1 else None
        if threads > 1 and openmp is None:
            return None
        made = compile_it(host_features(), openmp)
    except (ImportError, OSError, RuntimeError) as error:
        log.info("no CPU kernels can be compiled: %s", error)
        return None
    if made is not None and not is_right(made):
        log.warning("a kernel compiled for this CPU gives wrong results and is not used")
        return None
    return made


def _has_bf16_products(features: Mapping[str, bool]) -> bool:
    """Whether a CPU has native bf16 products."""
    return bool(features.get("avx512bf16") and features.get("avx512f"))


def _choose_arithmetic(
    dtype: torch.dtype, features: Mapping[str, bool], weight_dtype: torch.dtype = torch.bfloat16
) -> "Arithmetic | None":
    """Choose the fastest arithmetic for given types of rows and weights."""
    from molink.stage.cpu_kernels.arithmetic import DotBf16, WidenedBf16, WidenedF16

    if weight_dtype not in (torch.bfloat16, torch.float16):
        return None
    half = weight_dtype is torch.float16
    if dtype is torch.bfloat16 and not half and _has_bf16_products(features):
        return DotBf16()
    if dtype is not torch.float32 or (half and not features.get("f16c")):
        return None
    widened = WidenedF16 if half else WidenedBf16
    if features.get("avx512f"):
        return widened(lanes=16, vectors=2, tile=10)
    return widened() if features.get("avx2") and features.get("fma") else None


def _choose_block_arithmetic(
    dtype: torch.dtype, features: Mapping[str, bool]
) -> "Arithmetic | None":
    """Choose arithmetic for quantized weights, whose numbers are 16-bit."""
    if not features.get("f16c"):
        return None
    chosen = _choose_arithmetic(dtype, features)
    return chosen or _choose_arithmetic(torch.float32, features)


def _choose_integers(lanes: int, features: Mapping[str, bool]) -> "IntegerInstructions | None":
    """Choose the integer instructions for registers of ``lanes`` lanes."""
    from molink.stage.cpu_kernels.integer_dots import IntegerInstructions

    if lanes == 8:
        return IntegerInstructions(lanes, vnni=bool(features.get("avxvnni")))
    if not features.get("avx512bw"):
        return None
    return IntegerInstructions(lanes, vnni=bool(features.get("avx512vnni")))


def _choose_same_dtype(dtype: torch.dtype, features: Mapping[str, bool]) -> "Arithmetic | None":
    """Choose the arithmetic for operands of one type."""
    from molink.stage.cpu_kernels.arithmetic import DotBf16, Float32

    if dtype is torch.bfloat16 and _has_bf16_products(features):
        return DotBf16()
    if dtype is torch.float32 and features.get("avx512f"):
        return Float32(lanes=16, tile=12)
    if dtype is torch.float32 and features.get("avx2") and features.get("fma"):
        return Float32()
    return None


def _is_matmul_correct(product: "MatMul") -> bool:
    """Check with small integers, whose products are exact."""
    weight = torch.arange(96 * 64).remainder(7).sub(3).view(96, 64)
    rows = torch.arange(29 * 64).remainder(5).sub(2).view(29, 64)
    bias = torch.arange(96.0)
    given = product(product.pack_weight(weight), rows.to(product.dtype), bias)
    exact = (rows @ weight.T + bias).to(product.dtype)
    return torch.equal(given, exact)


def _is_unpacking_correct(product: "BlockMatMul | IntegerBlockMatMul") -> bool:
    """Check with unit rows that recover the weights of some blocks.

    Blocks are random bytes with reasonable scales.
    """
    form, columns, width = product.form, 2 * product.columns, 2 * product.form.block
    packed = torch.arange(columns * 2 * form.nbytes).mul(37).remainder(251)
    packed = packed.to(torch.uint8).view(2, -1)
    numbers = packed_scales(form, packed, product.columns)
    numbers.copy_(torch.linspace(-1, 2, numbers.numel()).view(numbers.shape))
    bound_steps(form, packed, product.columns)
    places = torch.arange(0, 3 * width, 7) % width
    rows = torch.zeros(len(places), width, dtype=product.dtype)
    rows[torch.arange(len(places)), places] = 1
    bias = torch.zeros(columns)
    given = product(packed, rows, bias)
    if not torch.equal(product(packed, rows[:7], bias), given[:7]):
        return False  # few rows, and many
    exact = unpack_rows(form, packed, product.columns, torch.arange(columns))[:, places].T
    # Integers round a codebook to 16 bits.
    within = 2**-7 if product.dtype is torch.bfloat16 else 2e-5
    return torch.allclose(given.float(), exact, rtol=within, atol=within * float(exact.abs().max()))


def _is_norm_correct(rowwise: "RowwiseKernels", eps: float) -> bool:
    """Whether a norm equals torch's up to rounding."""
    rows = torch.arange(5 * 48).remainder(11).sub(4).view(5, 48).to(rowwise.dtype)
    weight = torch.linspace(0.5, 2.0, 48)
    exact = rms_norm(rows.float(), weight.shape, weight, eps)
    within = _rounding_error(rowwise.dtype)
    return torch.allclose(
        rowwise.normalize_rows(rows, weight).float(), exact, rtol=within, atol=1e-6
    )


def _is_head_norm_correct(rowwise: "RowwiseKernels", eps: float) -> bool:
    """Whether norms of the first heads equal torch's and other heads are not changed."""
    heads = torch.linspace(-2, 3, 3 * 4 * 32).view(3, 4, 32).to(rowwise.dtype)
    weight = torch.linspace(0.5, 2.0, 3 * 32).view(3, 32)
    exact = heads.float()
    exact[:, :3] = rms_norm(exact[:, :3], (32,), None, eps) * weight
    rowwise.normalize_heads(heads[:, :3], weight)
    return torch.allclose(heads.float(), exact, rtol=_rounding_error(rowwise.dtype), atol=1e-6)


def _is_gate_correct(rowwise: "RowwiseKernels", activation: Activation) -> bool:
    """Whether a gate equals torch's up to rounding."""
    rows = torch.linspace(-9, 9, 3 * 96).view(3, 96).to(rowwise.dtype)
    active, up = rows.double().chunk(2, dim=-1)
    bent = silu(active) if activation == "silu" else gelu(active, approximate="tanh")
    found = rowwise.apply_gate(rows).float()
    within = _rounding_error(rowwise.dtype)
    return torch.allclose(found, (bent * up).float(), rtol=within, atol=1e-6)


def _is_rotation_correct(rowwise: "RowwiseKernels") -> bool:
    """Whether a rotation equals torch's, and leaves other dimensions alone."""
    heads = torch.linspace(-2, 2, 3 * 2 * 64).view(3, 2, 64).to(rowwise.dtype)
    angles = torch.linspace(-1, 1, 3 * 2 * 32).view(3, 1, 2, 32).to(rowwise.dtype)
    cosines, sines = angles.float().unbind(2)
    first, second = heads.float()[..., :32].chunk(2, dim=-1)
    exact = heads.float().clone()
    exact[..., :32] *= cosines
    exact[..., :32] += torch.cat((second, first), -1) * sines
    rowwise.rotate_heads(heads, angles)
    within = _rounding_error(rowwise.dtype)
    return torch.allclose(heads.float(), exact, rtol=within, atol=2 * within)


def _rounding_error(dtype: torch.dtype) -> float:
    return 2**-7 if dtype is torch.bfloat16 else 1e-5


def _assume_correct(_: object) -> bool:
    return True
