"""Whether this PC can do what ``--quantize`` asks of it, said before anything is loaded."""

from importlib.util import find_spec
from typing import Literal

from molink.checkpoint.config import ModelConfig
from molink.errors import UsageError
from molink.facts.model import Quantize

_PACKAGE = "bitsandbytes"


def check_quantize(
    wanted: Quantize, config: ModelConfig, kind: Literal["cpu", "cuda"] = "cpu"
) -> None:
    """Check that a stage of the model can be run as ``wanted`` on a device of this PC.

    int8 on a CPU needs no package: torch itself multiplies it.

    Raises:
        UsageError: the files are quantized otherwise, or a package is missing; says what to do.
    """
    check_quantize_files(wanted, config)
    mode = config.quantized if wanted == "none" else wanted
    if (mode == "nf4" or (mode == "int8" and kind == "cuda")) and find_spec(_PACKAGE) is None:
        raise UsageError(
            f"{mode} weights need {_PACKAGE}, which isn't installed on this PC: run "
            f"`pip install {_PACKAGE}` in molink's environment (or ./install.sh again)"
        )


def check_quantize_files(wanted: Quantize, config: ModelConfig) -> None:
    """Check that the model's files are not quantized in another way than ``wanted``.

    Raises:
        UsageError: they are; names both.
    """
    stored = config.quantized
    if "none" not in (wanted, stored) and wanted != stored:
        raise UsageError(
            f"--quantize {wanted} can't be done: this model's files are quantized as {stored}. "
            "Leave the option out, or take the model's bf16 or fp16 files"
        )
