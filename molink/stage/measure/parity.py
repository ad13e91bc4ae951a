"""Whether each kernel computes on this PC's device what plain torch does.

Run as ``python -m molink.stage.measure.parity``.

Prints a JSON object for each line: ``about`` (torch and its devices), then for each kernel
``begin``, by which who reads knows which one has ended the process, and ``result``. Inputs are
random, with a fixed seed; what they are compared with is computed on the CPU in float64. An error
is the greatest difference, as a part of the largest result; attention's are means of values of
about 1.
"""

import argparse
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from molink.facts.dtypes import WeightDType
from molink.facts.kernels import KernelName
from molink.facts.model import Quantize
from molink.gguf.blocks import PACKED
from molink.gguf.formats import FORMATS
from molink.stage.attention.base import Attention, AttentionShape
from molink.stage.attention.compiled import CompiledAttention
from molink.stage.attention.flash import PAGE, FlashAttention, find_kernel
from molink.stage.attention.gather import GatherAttention
from molink.stage.decoder.mlp import create_gate
from molink.stage.decoder.rotary import rotate
from molink.stage.kernels.create import (
    create_attend,
    create_block_matmul,
    create_matmul,
    create_rowwise,
)
from molink.stage.kernels.repack import arrange, parse, scales, take
from molink.stage.kernels.shape import AttendShape
from molink.stage.linear import CompiledLinear, Linear, PackedLinear, Projection
from molink.stage.linear.bnb import load_library
from molink.stage.linear.quantized import TOLERANCE, QuantizedKernels, relative_error
from molink.stage.measure.dense import attention_error
from molink.stage.measure.device import cpu_name, pick_device
from molink.stage.torch_dtypes import TORCH_DTYPES, cpu_has_bf16, has_bf16

#: Greatest error of a product or of a row's norm: what the type rounds to, and some sums.
_ROUNDING: dict[WeightDType, float] = {"f32": 1e-5, "f16": 2e-3, "bf16": 2**-7}
#: The same of attention, whose weights are rounded too.
_ATTENTION: dict[WeightDType, float] = {"f32": 1e-5, "f16": 5e-3, "bf16": 3e-2}
_SHAPES = ((96, 64), (256, 704), (1024, 128))
_ROWS = (1, 7, 33)
#: Of blocks: codes of all sizes, with everything that they may have beside.
_KINDS = ("q4_k", "q5_k", "q6_k", "q8_0")
_EPS = 1e-5


class _Absent(Exception):
    """There is no such kernel on this device."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One kernel, in one type. ``run`` gives its error, NaN if it gives any."""

    kernel: KernelName
    dtype: WeightDType
    tolerance: float
    run: Callable[[], float]

    def result(self) -> dict[str, Any]:
        """How it went: ``state`` is ``ok``, ``absent`` or ``wrong``."""
        told: dict[str, Any] = {"kernel": self.kernel, "dtype": self.dtype, "error": None}
        told |= {"tolerance": self.tolerance, "state": "wrong", "reason": ""}
        try:
            with torch.inference_mode():
                error = self.run()
        except _Absent as absent:
            return told | {"state": "absent", "reason": str(absent)}
        except Exception as error_of_kernel:  # whatever a kernel's build may raise
            return told | {"reason": f"{type(error_of_kernel).__name__}: {error_of_kernel}"[:300]}
        if math.isnan(error):
            return told | {"reason": "it gives NaN"}
        # Written so that infinity is wrong.
        return told | {"error": error, "state": "ok" if error <= self.tolerance else "wrong"}


def trials(device: torch.device, skip: Collection[str] = ()) -> Iterator[Trial]:
    """All that there may be on ``device``, but those of the kernels to ``skip``."""
    every = _on_cpu() if device.type == "cpu" else _on_cuda(device)
    return (trial for trial in every if trial.kernel not in skip)


def _on_cpu() -> Iterator[Trial]:
    cpu, threads = torch.device("cpu"), torch.get_num_threads()
    types: tuple[WeightDType, ...] = ("f32", "bf16") if cpu_has_bf16() else ("f32",)
    for name in types:
        dtype, rounding = TORCH_DTYPES[name], _ROUNDING[name]
        yield Trial("torch", name, rounding, partial(_linear, _plain, dtype, cpu))
        yield Trial("gather-attention", name, _ATTENTION[name], partial(_gather, dtype, cpu))
        compiled = partial(_compiled, dtype, threads)
        yield Trial("compiled-linear", name, rounding, partial(_linear, compiled, dtype, cpu))
        yield Trial("gguf-blocks", name, rounding, partial(_blocks, dtype, threads))
        for mode in ("int8", "nf4"):
            yield Trial(mode, name, TOLERANCE, partial(_quantized, mode, dtype, cpu))
    yield Trial("packed-linear", "bf16", 2**-7, partial(_linear, _packed, torch.bfloat16, cpu))
    yield Trial("compiled-rows", "bf16", 2**-7, partial(_rowwise, threads))
    run = partial(_compiled_attention, threads)
    yield Trial("compiled-attention", "bf16", _ATTENTION["bf16"], run)


def _on_cuda(device: torch.device) -> Iterator[Trial]:
    types: tuple[WeightDType, ...] = ("f16", "bf16") if has_bf16(device) else ("f16",)
    for name in types:
        dtype, rounding = TORCH_DTYPES[name], _ROUNDING[name]
        yield Trial("torch", name, rounding, partial(_linear, _plain, dtype, device))
        yield Trial("gather-attention", name, _ATTENTION[name], partial(_gather, dtype, device))
        yield Trial("flash-attention", name, _ATTENTION[name], partial(_flash, dtype, device))
        for mode in ("int8", "nf4"):
            yield Trial(mode, name, TOLERANCE, partial(_quantized, mode, dtype, device))


# --- products ---------------------------------------------------------------------------------


def _linear(
    create: Callable[[Tensor, Tensor], Projection], dtype: torch.dtype, device: torch.device
) -> float:
    generator, worst = torch.Generator().manual_seed(0), []
    for out, width in _SHAPES:
        weight = torch.randn(out, width, generator=generator).bfloat16()
        bias = torch.randn(out, generator=generator).bfloat16()
        projection = create(weight.to(device), bias.to(device, dtype))
        for count in _ROWS:
            rows = torch.randn(count, width, generator=generator).to(dtype)
            exact = rows.double() @ weight.double().t() + bias.double()
            worst.append(_difference(projection(rows.to(device)), exact))
    return _greatest(worst)


def _plain(weight: Tensor, bias: Tensor) -> Projection:
    return Linear(weight.to(bias.dtype), bias)


def _packed(weight: Tensor, bias: Tensor) -> Projection:
    try:
        return PackedLinear.pack(weight, bias)
    except (AttributeError, RuntimeError) as error:
        raise _Absent(f"this torch can't pack weights: {error}") from None


def _compiled(dtype: torch.dtype, threads: int, weight: Tensor, bias: Tensor) -> Projection:
    product = create_matmul(dtype, threads, checked=False)
    if product is None:
        raise _Absent("there is no code for this CPU")
    return CompiledLinear.pack(product, weight, bias)


def _blocks(dtype: torch.dtype, threads: int) -> float:
    generator, worst = torch.Generator().manual_seed(0), []
    for name in _KINDS:
        form, kind = FORMATS[name], PACKED[name]
        product = create_block_matmul(name, dtype, threads, checked=False)
        if product is None:
            raise _Absent("there is no code for this CPU")
        stored = torch.randint(256, (96, 3 * kind.nbytes), generator=generator, dtype=torch.uint8)
        packed = arrange(form, parse(name, stored), product.columns)
        numbers = scales(form, packed, product.columns)
        numbers.copy_(torch.rand(numbers.shape, generator=generator))
        weight = take(form, packed, product.columns, torch.arange(len(stored)))
        bias = torch.randn(len(stored), generator=generator)
        for count in _ROWS:
            rows = torch.randn(count, weight.shape[1], generator=generator).to(product.dtype)
            exact = rows.double() @ weight.double().t() + bias.double()
            worst.append(_difference(product(packed, rows, bias), exact))
    return _greatest(worst)


def _quantized(mode: Quantize, dtype: torch.dtype, device: torch.device) -> float:
    if device.type == "cuda":
        load_library()  # which registers its operators
        return relative_error(QuantizedKernels(True, True), mode, dtype, device)
    kernels = QuantizedKernels.probe(mode, dtype, device)
    if not (kernels.int8 or kernels.nf4):
        raise _Absent("this CPU has no instructions for it")
    return relative_error(kernels, mode, dtype, device)


# --- rows and attention -----------------------------------------------------------------------


def _rowwise(threads: int) -> float:
    generator, worst = torch.Generator().manual_seed(0), []
    for activation in ("silu", "gelu_tanh"):
        made = create_rowwise(_EPS, activation, threads, checked=False)
        if made is None:
            raise _Absent("there is no code for this CPU")
        for count in _ROWS:
            rows = torch.randn(count, 192, generator=generator).mul(3).bfloat16()
            weight = torch.randn(192, generator=generator)
            normed = rms_norm(rows.double(), weight.shape, weight.double(), _EPS)
            worst.append(_difference(made.norm(rows, weight), normed))
            gated = create_gate(activation)(rows.double())
            worst.append(_difference(made.gate(rows), gated))
            heads = torch.randn(count, 5, 64, generator=generator).bfloat16()
            angles = torch.randn(count, 1, 2, 32, generator=generator).bfloat16()
            turned = heads.double()
            rotate(turned, angles.double())
            made.rotate(heads, angles)
            worst.append(_difference(heads, turned))
    return _greatest(worst)


def _shape(windows: tuple[int, ...]) -> AttentionShape:
    return AttentionShape(kv_heads=2, groups=4, head_dim=64, scale=0.125, windows=windows)


def _gather(dtype: torch.dtype, device: torch.device) -> float:
    return attention_error(GatherAttention, _shape((0, 33)), 16, dtype, device)


def _compiled_attention(threads: int) -> float:
    shape = _shape((0, 33))
    numbers = AttendShape(shape.kv_heads, shape.groups, shape.head_dim, shape.scale, 16)
    attend = create_attend(numbers, threads)
    if attend is None:
        raise _Absent("there is no code for this CPU")

    def create(layer: AttentionShape) -> Attention:
        return CompiledAttention(layer, attend)

    return attention_error(create, shape, 16, torch.bfloat16, torch.device("cpu"))


def _flash(dtype: torch.dtype, device: torch.device) -> float:
    kernel = find_kernel()
    if kernel is None:
        raise _Absent(f"torch {torch.__version__} has no varlen_attn with a block table")
    if torch.cuda.get_device_capability(device)[0] < 8:
        raise _Absent("it needs an Ampere GPU (RTX 30) or a newer one")

    def create(layer: AttentionShape) -> Attention:
        return FlashAttention(layer, kernel)

    return attention_error(create, _shape((0, 33)), PAGE, dtype, device)


def _difference(found: Tensor, exact: Tensor) -> float:
    return float((found.double().cpu() - exact).abs().max() / exact.abs().max())


def _greatest(errors: Sequence[float]) -> float:
    return math.nan if any(math.isnan(one) for one in errors) else max(errors)


# --- the process ------------------------------------------------------------------------------


def about() -> dict[str, Any]:
    """Torch here, and the GPUs that it can use; ``reason`` says why it can't use any."""
    told: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
    told |= {"reason": "", "kernels_for": []}
    try:
        if torch.version.cuda is not None:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            told["kernels_for"] = torch.cuda.get_arch_list()
    except (RuntimeError, AssertionError) as error:
        return told | {"reason": str(error).strip()[:300]}
    for index in range(torch.cuda.device_count() if torch.version.cuda is not None else 0):
        major, minor = torch.cuda.get_device_capability(index)
        card = {"name": torch.cuda.get_device_name(index), "capability": f"{major}.{minor}"}
        told["gpus"].append(card)
    return told


def _name(device: torch.device) -> str:
    return cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all trials."""
    parser = argparse.ArgumentParser(
        prog="python -m molink.stage.measure.parity", description=__doc__
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0 = torch's default")
    parser.add_argument("--skip", default="", help="kernels, separated by commas")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    _tell(about=about())
    device = pick_device(options.device)
    _tell(device=str(device), name=_name(device))
    for trial in trials(device, options.skip.split(",")):
        _tell(begin={"kernel": trial.kernel, "dtype": trial.dtype})
        _tell(result=trial.result())


def _tell(**told: Any) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
