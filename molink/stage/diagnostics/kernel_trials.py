"""Compares kernels with plain computations, in a model's shapes.

Inputs are random with a fixed seed; references are float64 on the CPU. Errors are relative to the
largest result; attention's outputs have magnitude 1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from molink.checkpoint.traits import Activation
from molink.facts.dtypes import WeightDType
from molink.facts.kernels import INTEGER_KERNELS, KernelName
from molink.facts.model import Quantize
from molink.gguf.block_formats import (
    BLOCK_FORMATS,
    MXFP4_BLOCK,
    ROW_MULTIPLE,
    BlockFormat,
    fits_planes,
    fits_rows,
    float4_format,
)
from molink.stage.attention.base import AttentionBackend, AttentionShape, BackendName
from molink.stage.attention.compiled import CompiledAttention, compile_attention
from molink.stage.attention.flash import PAGE_MULTIPLE, FlashAttention, find_kernel
from molink.stage.attention.gather import GatherAttention, PlainAttention
from molink.stage.cpu_kernels.create import (
    create_block_matmul,
    create_integer_matmul,
    create_matmul,
    create_rowwise,
)
from molink.stage.cpu_kernels.kernel_shape import supports_rowwise
from molink.stage.cpu_kernels.repack import bound_steps, packed_scales, unpack_rows
from molink.stage.decoder.mlp import create_gate
from molink.stage.decoder.operators import MAX_FUSED_WIDTH
from molink.stage.decoder.rotary import rotate_half
from molink.stage.device_copy import pinned_error
from molink.stage.diagnostics.attention_timing import is_slower
from molink.stage.diagnostics.reference_attention import attention_error
from molink.stage.diagnostics.trial_shapes import USUAL_SHAPES, TrialShapes
from molink.stage.gpu_kernels.block_product import find_planes_problem
from molink.stage.gpu_kernels.triton_support import find_triton_problem
from molink.stage.graphs.capture import CudaGraphCapturer
from molink.stage.linear import (
    PackedLinear,
    PlainLinear,
    Projection,
    ProjectionFactory,
    has_slow_integers,
    integer_kernel,
    slow_kernels,
)
from molink.stage.linear.base import PRODUCT_TOLERANCES, make_random_weight
from molink.stage.linear.experts_check import experts_error, routing_error
from molink.stage.linear.nf4 import NF4_FORMAT, load_library
from molink.stage.linear.planes_check import planes_error
from molink.stage.linear.quantized import (
    TOLERANCE,
    QuantizedProjectionFactory,
    has_slow_blocks,
    quantized_format,
    relative_error,
)
from molink.stage.out_of_memory import empty_device_cache, is_out_of_memory
from molink.stage.sampling.create import DRAWS_TOLERANCE, draws_error
from molink.stage.torch_dtypes import TORCH_DTYPES, supports_bf16

if TYPE_CHECKING:
    from molink.stage.cpu_kernels.block_integers import IntegerBlockMatMul
    from molink.stage.cpu_kernels.block_matmul import BlockMatMul

#: Tolerances of attention, which also rounds its softmax weights.
_ATTENTION_TOLERANCES: dict[WeightDType, float] = {"f32": 1e-5, "f16": 5e-3, "bf16": 3e-2}
#: Tolerance of integer products, which round a codebook to 16 bits.
_CODEBOOK_TOLERANCE = 5e-5
#: Factor of tolerances for kernels that have no replacement.
_LENIENT_FACTOR = 4.0
_ROWS = (1, 7, 33)
#: Outputs of a quantized product.
_BLOCK_OUTPUTS = 96
#: Formats that cover all code sizes and variants.
_TRIAL_FORMATS = (
    *(BLOCK_FORMATS[name] for name in ("q4_k", "q5_k", "q6_k", "q8_0")),
    BlockFormat(4, 8, 128, 128, has_shifts=True),
    BlockFormat(8, 0, 64, 64, number_dtype="bf16"),
    BLOCK_FORMATS["iq4_xs"],
    float4_format(MXFP4_BLOCK, 128, "e8m0"),
    NF4_FORMAT,
)
#: Formats and columns of weights in bit planes, one for each width of a slice. There are few, since
#: each takes seconds to compile; a stage tries its own formats.
_TRIAL_PLANES = ((BLOCK_FORMATS["q4_k"], 512), (BLOCK_FORMATS["q6_k"], 512))
#: Heads of typical models with 7 to 9 billion parameters.
_USUAL_HEADS = AttentionShape(kv_heads=8, groups=4, head_dim=128, scale=128**-0.5, windows=(0,))
#: Detail of a trial that must be repeated later.
NO_MEMORY = "not enough memory to test it"
#: Compared outputs of a product, spread evenly.
_MAX_COMPARED_OUTPUTS = 64
_GRAPH_BYTES = 1 << 28

#: Creates a projection from a weight (bf16 ``[out, in]``) and a bias in the rows' dtype.
_CreateLinear = Callable[[Tensor, Tensor], Projection]


class _KernelAbsent(Exception):
    """The kernel does not exist on this device."""


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """One kernel in one type; ``run`` returns its error, possibly NaN.

    ``is_slow``, if set, times it against its fallback.
    """

    kernel: KernelName
    dtype: WeightDType
    tolerance: float
    run: Callable[[], float]
    is_slow: Callable[[], bool] | None = None

    def run_trial(self) -> dict[str, Any]:
        """Run the trial; ``state`` is ``ok``, ``absent`` or ``wrong``."""
        result: dict[str, Any] = {"kernel": self.kernel, "dtype": self.dtype, "error": None}
        result |= {"tolerance": self.tolerance, "state": "wrong", "reason": ""}
        try:
            with torch.inference_mode():
                error = self.run()
        except _KernelAbsent as absent:
            return result | {"state": "absent", "reason": str(absent)}
        except NotImplementedError as missing:  # this build of torch lacks the operator
            return result | {"state": "absent", "reason": str(missing)[:300]}
        except Exception as error_of_kernel:  # kernels may raise anything
            reason = f"{type(error_of_kernel).__name__}: {error_of_kernel}"[:300]
            if is_out_of_memory(error_of_kernel):
                empty_device_cache()
                return result | {
                    "state": "absent",
                    "reason": f"{NO_MEMORY}: {reason}",
                }
            return result | {"reason": reason}
        if math.isnan(error):
            return result | {"reason": "it gives NaN"}
        # Infinity is also wrong.
        return result | {"error": error, "state": "ok" if error <= self.tolerance else "wrong"}


#: Kernels for one purpose, in order of preference.
KernelChain = tuple[KernelTrial, ...]


def supported_dtypes(device: torch.device) -> tuple[WeightDType, ...]:
    """List the dtypes in which a device computes."""
    wide: tuple[WeightDType, ...] = ("f16",) if device.type == "cuda" else ("f32",)
    return (*wide, "bf16") if supports_bf16(device) else wide


def kernel_chains(
    shapes: TrialShapes, dtype: WeightDType, quantize: Quantize, device: torch.device
) -> tuple[KernelChain, ...]:
    """List the kernels that a stage may use on ``device``, by purpose."""
    rounding, computed = PRODUCT_TOLERANCES[dtype], TORCH_DTYPES[dtype]

    def product(create: _CreateLinear) -> Callable[[], float]:
        return partial(_linear_error, create, shapes.products, computed, device)

    last = _LENIENT_FACTOR * rounding
    made = list(_quantized_chains(shapes, dtype, quantize, device))
    torch_rows = KernelTrial(
        "torch-rows", dtype, last, partial(_torch_rows_error, shapes, computed, device)
    )
    plain = KernelTrial("torch", dtype, last, product(_create_plain))
    if device.type == "cuda":
        planes = shapes.planes + quantized_forms(quantize, shapes.products, on_gpu=True)
        if planes:
            made.append((_planes_trial(planes, dtype, device),))
        if shapes.experts is not None:
            made.append((_experts_trial(shapes, dtype, quantize, device),))
        error = partial(_fused_rows_error, shapes, computed, device)
        fused = KernelTrial("compiled-rows", dtype, rounding, error)
        draws = KernelTrial(
            "compiled-sampling", dtype, DRAWS_TOLERANCE, partial(_draws_error, device)
        )
        chains = (*made, (plain,), (fused, torch_rows), (draws,))
        return (*chains, _attention_chain(shapes, dtype, device))
    threads = torch.get_num_threads()
    packed = (KernelTrial("packed-linear", dtype, rounding, product(_create_packed)),)
    rows = KernelTrial(
        "compiled-rows", dtype, rounding, partial(_compiled_rows_error, shapes, computed, threads)
    )
    narrow = dtype == "bf16"
    return (
        *made,
        (
            KernelTrial(
                "compiled-linear",
                dtype,
                rounding,
                partial(_compiled_error, shapes, computed, threads),
                lambda: "compiled-linear" in slow_kernels(computed, device),
            ),
            *(packed if narrow else ()),
            plain,
        ),
        (rows, torch_rows),
        _attention_chain(shapes, dtype, device),
    )


def _quantized_chains(
    shapes: TrialShapes, dtype: WeightDType, quantize: Quantize, device: torch.device
) -> tuple[KernelChain, ...]:
    """List the products with weights that become int8 or nf4, if they do."""
    if quantize == "none":
        return ()
    computed = TORCH_DTYPES[dtype]
    fast = KernelTrial(
        quantize,
        dtype,
        TOLERANCE,
        partial(_quantized_error, quantize, shapes, computed, device),
    )
    unpacked = KernelTrial(
        "unpacked",
        dtype,
        _LENIENT_FACTOR * TOLERANCE,
        partial(_unpacked_error, quantize, shapes, computed, device),
    )
    if device.type != "cpu":
        return ((fast, unpacked),)
    in_place = KernelTrial(
        "quantized-blocks",
        dtype,
        PRODUCT_TOLERANCES[dtype],
        partial(_in_place_error, quantize, shapes, computed),
        partial(has_slow_blocks, computed, quantize),
    )
    return ((in_place, fast, unpacked),)


def integer_chains(formats: Sequence[BlockFormat], dtype: WeightDType) -> tuple[KernelChain, ...]:
    """List the products of weights in ``formats`` with 8-bit rows, on a CPU."""
    computed, threads = TORCH_DTYPES[dtype], torch.get_num_threads()
    create = partial(create_integer_matmul, dtype=computed, threads=threads, checked=False)
    chains: list[KernelChain] = []
    for kernel in INTEGER_KERNELS:
        forms = [form for form in formats if integer_kernel(form) == kernel]
        if forms:
            run = partial(_format_error, create, forms, whole_rows=True)
            is_slow = partial(has_slow_integers, computed, kernel)
            tolerance = max(PRODUCT_TOLERANCES[dtype], _CODEBOOK_TOLERANCE)
            chains.append((KernelTrial(kernel, dtype, tolerance, run, is_slow),))
    return tuple(chains)


def extra_trials(dtype: WeightDType, device: torch.device) -> tuple[KernelTrial, ...]:
    """List the trials that are independent of shapes."""
    computed = TORCH_DTYPES[dtype]
    if device.type != "cuda":
        run = partial(_blocks_error, computed, torch.get_num_threads())
        blocks = KernelTrial("gguf-blocks", dtype, PRODUCT_TOLERANCES[dtype], run)
        return (
            blocks,
            *(trial for chain in integer_chains(_TRIAL_FORMATS, dtype) for trial in chain),
        )
    return (
        _planes_trial(_TRIAL_PLANES, dtype, device),
        KernelTrial("pinned-copies", dtype, 0.0, partial(pinned_error, device)),
        KernelTrial("graphs", dtype, 0.0, partial(_graphs_error, computed, device)),
    )


def memory_trials(device: torch.device) -> tuple[KernelTrial, ...]:
    """List trials of the kernels behind a GPU's memory plans, in its usual dtype and shapes."""
    dtype: WeightDType = "bf16" if supports_bf16(device) else "f16"
    shapes = replace(USUAL_SHAPES, attention=_USUAL_HEADS)
    paged = replace(shapes, block_size=PAGE_MULTIPLE)
    flash, *_ = _attention_chain(paged, dtype, device)
    _, triton, *_ = _attention_chain(shapes, dtype, device)
    return _planes_trial(_TRIAL_PLANES, dtype, device), flash, triton


def _attention_chain(shapes: TrialShapes, dtype: WeightDType, device: torch.device) -> KernelChain:
    computed, tolerance = TORCH_DTYPES[dtype], _ATTENTION_TOLERANCES[dtype]
    error = partial(attention_error, page=shapes.block_size, dtype=computed, device=device)
    gather = partial(error, GatherAttention, shapes.attention)
    plain = partial(error, PlainAttention, shapes.attention)
    common = (
        KernelTrial("gather-attention", dtype, tolerance, gather),
        KernelTrial("plain-attention", dtype, _LENIENT_FACTOR * tolerance, plain),
    )
    if device.type == "cuda":
        flash = partial(_flash_error, shapes, computed, device)
        triton = partial(_triton_error, shapes, computed, device)

        def is_slow(preferred: BackendName, other: BackendName) -> bool:
            return is_slower(preferred, other, shapes, computed, device)

        return (
            KernelTrial(
                "flash-attention", dtype, tolerance, flash, partial(is_slow, "flash", "triton")
            ),
            KernelTrial(
                "triton-attention", dtype, tolerance, triton, partial(is_slow, "triton", "gather")
            ),
            *common,
        )
    run = partial(_compiled_attention_error, shapes, computed)
    return (KernelTrial("compiled-attention", dtype, tolerance, run), *common)


# --- products ---------------------------------------------------------------------------------


def _linear_error(
    create: _CreateLinear,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    weight_dtype: torch.dtype = torch.bfloat16,
) -> float:
    generator, worst = torch.Generator().manual_seed(0), []
    for out, width in shapes:
        weight = make_random_weight(out, width, generator).to(weight_dtype)
        bias = torch.randn(out, generator=generator).bfloat16()
        projection = create(weight.to(device), bias.to(device, dtype))
        some = slice(0, out, max(1, out // _MAX_COMPARED_OUTPUTS))
        few, added = weight[some].double().t(), bias[some].double()
        for count in _ROWS:
            rows = torch.randn(count, width, generator=generator).to(dtype)
            found = projection(rows.to(device))[:, some]
            worst.append(_max_difference(found, rows.double() @ few + added))
    return _max_error(worst)


def _create_plain(weight: Tensor, bias: Tensor) -> Projection:
    return PlainLinear(weight.to(bias.dtype), bias)


def _create_packed(weight: Tensor, bias: Tensor) -> Projection:
    try:
        return PackedLinear.pack_weight(weight, bias)
    except (AttributeError, RuntimeError) as error:
        raise _KernelAbsent(f"this torch can't pack weights: {error}") from None


def _compiled_error(shapes: TrialShapes, dtype: torch.dtype, threads: int) -> float:
    """Return the error with bf16 weights, and with float16 weights if they stay float16."""
    errors = []
    for weight_dtype in (torch.bfloat16, torch.float16):
        # A kernel that failed its own check is compiled again, to measure the error.
        product = create_matmul(dtype, threads, weight_dtype)
        product = product or create_matmul(dtype, threads, weight_dtype, checked=False)
        if product is not None:
            create = ProjectionFactory(dtype, product).create_projection
            cpu = torch.device("cpu")
            errors.append(_linear_error(create, shapes.products, dtype, cpu, weight_dtype))
    if not errors:
        raise _KernelAbsent("this CPU is not supported")
    return _max_error(errors)


def _blocks_error(dtype: torch.dtype, threads: int) -> float:
    create = partial(create_block_matmul, dtype=dtype, threads=threads, checked=False)
    return _format_error(create, _TRIAL_FORMATS)


def _format_error(
    create: "Callable[[BlockFormat], BlockMatMul | IntegerBlockMatMul | None]",
    forms: Sequence[BlockFormat],
    whole_rows: bool = False,
) -> float:
    """Return the largest error over formats; ``whole_rows`` fit 8 bits exactly."""
    generator, worst = torch.Generator().manual_seed(0), []
    for form in forms:
        product = create(form)
        if product is None:
            raise _KernelAbsent("this CPU is not supported")
        nbytes = 3 * product.columns * form.nbytes
        shape = _BLOCK_OUTPUTS // product.columns, nbytes
        packed = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        numbers = packed_scales(form, packed, product.columns)
        numbers.copy_(torch.rand(numbers.shape, generator=generator))
        bound_steps(form, packed, product.columns)
        weight = unpack_rows(form, packed, product.columns, torch.arange(_BLOCK_OUTPUTS))
        bias = torch.randn(_BLOCK_OUTPUTS, generator=generator)
        for count in _ROWS:
            rows = torch.randn(count, weight.shape[1], generator=generator)
            if whole_rows:
                rows = rows.mul_(32).round_().clamp_(-127, 127)
                rows[:, :: min(form.group, 16)] = 127
            rows = rows.to(product.dtype)
            exact = rows.double() @ weight.double().t() + bias.double()
            worst.append(_max_difference(product(packed, rows, bias), exact))
    return _max_error(worst)


def _planes_trial(
    planes: Sequence[tuple[BlockFormat, int]], dtype: WeightDType, device: torch.device
) -> KernelTrial:
    """Create the trial of weights in bit planes, given their formats and columns."""

    def find_error() -> float:
        problem = find_planes_problem(device)
        if problem:
            raise _KernelAbsent(problem)
        computed = TORCH_DTYPES[dtype]
        return _max_error([planes_error(*one, computed, device) for one in planes])

    return KernelTrial("gguf-blocks", dtype, PRODUCT_TOLERANCES[dtype], find_error)


def _experts_trial(
    shapes: TrialShapes, dtype: WeightDType, quantize: Quantize, device: torch.device
) -> KernelTrial:
    """Create the trial of experts that are multiplied at once, as in ``shapes``."""

    def find_error() -> float:
        problem = find_planes_problem(device)
        if problem:
            raise _KernelAbsent(problem)
        assert shapes.experts is not None  # otherwise there is no trial
        computed = TORCH_DTYPES[dtype]
        forms = {*shapes.expert_planes, *quantized_forms(quantize, shapes.products, on_gpu=True)}
        errors = [experts_error(*one, computed, device) for one in sorted(forms, key=repr)]
        return _max_error([routing_error(shapes.experts, computed, device), *errors])

    return KernelTrial("grouped-experts", dtype, PRODUCT_TOLERANCES[dtype], find_error)


def quantized_forms(
    mode: Quantize, products: Sequence[tuple[int, int]], *, on_gpu: bool
) -> tuple[tuple[BlockFormat, int], ...]:
    """List format and columns of weights that are quantized on loading and multiplied in place."""
    if mode == "none":
        return ()
    fits, found = fits_planes if on_gpu else fits_rows, []
    for width in sorted({width for _, width in products}):
        form = quantized_format(mode, width, on_gpu=on_gpu)
        if fits(form, (ROW_MULTIPLE, width)):
            found.append((form, width))
    return tuple(found)


def _in_place_error(mode: Quantize, shapes: TrialShapes, dtype: torch.dtype) -> float:
    cpu = torch.device("cpu")
    blocks = ProjectionFactory.probe_device(dtype, cpu, INTEGER_KERNELS)
    factory = QuantizedProjectionFactory(False, False, blocks)
    fitting = [shape for shape in shapes.products if factory.find_format(mode, shape)]
    if not fitting:
        raise _KernelAbsent("this CPU or these shapes are not supported")
    return relative_error(factory, mode, dtype, cpu, fitting)


def _quantized_error(
    mode: Quantize, shapes: TrialShapes, dtype: torch.dtype, device: torch.device
) -> float:
    if device.type == "cuda":
        load_library()  # registers its operators
        return relative_error(
            QuantizedProjectionFactory(True, True), mode, dtype, device, shapes.products
        )
    factory = QuantizedProjectionFactory.probe_device(mode, dtype, device)
    if not (factory.int8 or factory.nf4):
        raise _KernelAbsent("this CPU lacks the instructions")
    return relative_error(factory, mode, dtype, device, shapes.products)


def _unpacked_error(
    mode: Quantize, shapes: TrialShapes, dtype: torch.dtype, device: torch.device
) -> float:
    factory = QuantizedProjectionFactory(False, False)
    return relative_error(factory, mode, dtype, device, shapes.products)


# --- rows and attention -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RowKernels:
    """Row-wise operators under test; all but ``rotate`` return new rows."""

    norm: Callable[[Tensor, Tensor], Tensor]
    gate: Callable[[Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor], object]


def _compiled_rows_error(shapes: TrialShapes, dtype: torch.dtype, threads: int) -> float:
    if not supports_rowwise((shapes.hidden, *shapes.inner), shapes.rotary):
        raise _KernelAbsent("rows of this size are not supported")

    def create(activation: Activation) -> _RowKernels:
        made = create_rowwise(dtype, shapes.eps, activation, threads)
        made = made or create_rowwise(dtype, shapes.eps, activation, threads, checked=False)
        if made is None:
            raise _KernelAbsent("this CPU is not supported")
        return _RowKernels(made.normalize_rows, made.apply_gate, made.rotate_heads)

    return _rows_error(create, shapes, dtype, torch.device("cpu"))


def _fused_rows_error(shapes: TrialShapes, dtype: torch.dtype, device: torch.device) -> float:
    problem = find_triton_problem()
    if problem:
        raise _KernelAbsent(f"Triton can't be used: {problem}")
    if shapes.hidden > MAX_FUSED_WIDTH:
        raise _KernelAbsent("rows of this size are not supported")
    from molink.stage.decoder.fused_check import fused_rows_error

    return fused_rows_error(shapes, dtype, device)


def _draws_error(device: torch.device) -> float:
    problem = find_triton_problem()
    if problem:
        raise _KernelAbsent(f"Triton can't be used: {problem}")
    return draws_error(device)


def _torch_rows_error(shapes: TrialShapes, dtype: torch.dtype, device: torch.device) -> float:
    def norm(rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows.float(), weight.shape, weight, shapes.eps).to(dtype)

    def create(activation: Activation) -> _RowKernels:
        return _RowKernels(norm, create_gate(activation), rotate_half)

    return _rows_error(create, shapes, dtype, device)


def _rows_error(
    create: Callable[[Activation], _RowKernels],
    shapes: TrialShapes,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    generator, worst = torch.Generator().manual_seed(0), []

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).mul(3).to(dtype)

    for activation in shapes.activations:
        made = create(activation)
        for count in _ROWS:
            rows, weight = noise(count, shapes.hidden), noise(shapes.hidden).float()
            normed = rms_norm(rows.double(), weight.shape, weight.double(), shapes.eps)
            worst.append(_max_difference(made.norm(rows.to(device), weight.to(device)), normed))
            for inner in shapes.inner:
                rows = noise(count, 2 * inner)
                gated = create_gate(activation)(rows.double())
                worst.append(_max_difference(made.gate(rows.to(device)), gated))
            for turned in shapes.rotary:
                heads = noise(count, 5, max(turned, shapes.attention.head_dim))
                angles = noise(count, 1, 2, turned).div_(3)
                exact, found = heads.double(), heads.to(device, copy=True)
                rotate_half(exact, angles.double())
                made.rotate(found, angles.to(device))
                worst.append(_max_difference(found, exact))
    return _max_error(worst)


def _compiled_attention_error(shapes: TrialShapes, dtype: torch.dtype) -> float:
    attend = compile_attention(shapes.attention, shapes.block_size, dtype)
    if attend is None:
        raise _KernelAbsent("this CPU, or these heads and blocks, are not supported")

    def create(layer: AttentionShape) -> AttentionBackend:
        return CompiledAttention(layer, attend)

    cpu = torch.device("cpu")
    return attention_error(create, shapes.attention, shapes.block_size, dtype, cpu)


def _flash_error(shapes: TrialShapes, dtype: torch.dtype, device: torch.device) -> float:
    kernel = find_kernel()
    if kernel is None:
        raise _KernelAbsent(f"torch {torch.__version__} has no varlen_attn with a block table")
    if torch.cuda.get_device_capability(device)[0] < 8:
        raise _KernelAbsent("it needs an Ampere GPU (RTX 30) or a newer one")
    if shapes.attention.softcap or shapes.attention.sinks or shapes.attention.chunked:
        raise _KernelAbsent("it has no softcap, no attention sinks and no chunks")
    if shapes.block_size % PAGE_MULTIPLE:
        raise _KernelAbsent(
            f"KV blocks of {shapes.block_size} positions are not a multiple of {PAGE_MULTIPLE}"
        )

    def create(layer: AttentionShape) -> AttentionBackend:
        return FlashAttention(layer, kernel)

    return attention_error(create, shapes.attention, shapes.block_size, dtype, device)


def _triton_error(shapes: TrialShapes, dtype: torch.dtype, device: torch.device) -> float:
    problem = find_triton_problem()
    if problem:
        raise _KernelAbsent(f"Triton can't be used: {problem}")
    from molink.stage.attention.triton_attention import TritonAttention

    return attention_error(TritonAttention, shapes.attention, shapes.block_size, dtype, device)


# --- a GPU's own ------------------------------------------------------------------------------


def _graphs_error(dtype: torch.dtype, device: torch.device) -> float:
    """Return the error of a captured product that is replayed with other rows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 128, generator=generator).to(device, dtype)
    rows = torch.zeros(8, 128, dtype=dtype, device=device)
    output = torch.zeros(8, 256, dtype=dtype, device=device)
    replay = CudaGraphCapturer(device).capture_work(
        lambda: _linear_into(output, rows, weight), _GRAPH_BYTES
    )
    if replay is None:
        raise _KernelAbsent("no memory for a graph")
    worst = []
    for _ in range(4):
        rows.copy_(torch.randn(8, 128, generator=generator))
        replay()
        # The same work must produce the same result.
        worst.append(_max_difference(output, (rows @ weight.t()).relu_().double().cpu()))
    return _max_error(worst)


def _linear_into(output: Tensor, rows: Tensor, weight: Tensor) -> None:
    output.copy_((rows @ weight.t()).relu_())


def _max_difference(found: Tensor, exact: Tensor) -> float:
    return float((found.double().cpu() - exact).abs().max() / exact.abs().max())


def _max_error(errors: Sequence[float]) -> float:
    return math.nan if any(math.isnan(one) for one in errors) else max(errors)
