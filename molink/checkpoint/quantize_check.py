"""Checks ``--quantize`` before anything is loaded."""

from importlib.util import find_spec
from typing import Literal

from molink.checkpoint.config import ModelConfig
from molink.errors import UsageError
from molink.facts.model import Quantize

_PACKAGE = "bitsandbytes"


def check_quantize(
    wanted: Quantize, config: ModelConfig, kind: Literal["cpu", "cuda"] = "cpu"
) -> None:
    """Check that a stage of the model can run with the quantization ``wanted`` on this PC.

    int8 on a CPU needs no package: torch implements it.

    Raises:
        UsageError: The files are quantized differently, or a package is missing.
    """
    check_quantize_files(wanted, config)
    mode = config.quantized if wanted == "none" else wanted
    if (mode == "nf4" or (mode == "int8" and kind == "cuda")) and find_spec(_PACKAGE) is None:
        raise UsageError(
            f"{mode} weights need {_PACKAGE}, which is not installed on this PC: run `molink setup`"
        )


def check_quantize_files(wanted: Quantize, config: ModelConfig) -> None:
    """Check that the model's files are not quantized differently from ``wanted``.

    Raises:
        UsageError: They are.
    """
    stored = config.quantized
    if "none" not in (wanted, stored) and wanted != stored:
        raise UsageError(
            f"--quantize {wanted} is not possible: this model's files are quantized as {stored}. "
            "Omit the option, or use the model's bf16 or fp16 files"
        )
