"""Compares all kernels with plain torch on this PC's devices.

Run as ``python -m molink.stage.diagnostics.parity``.

Prints JSON objects, one per line: the torch version and devices, then, per kernel, ``begin`` (which
identifies a kernel that crashes the process) and ``result``; see
:mod:`molink.stage.diagnostics.kernel_trials`.
"""

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from molink.checkpoint.config import ModelConfig
from molink.errors import MolinkError
from molink.stage.attention.flash import PAGE_MULTIPLE, find_kernel
from molink.stage.diagnostics.device import pick_device
from molink.stage.diagnostics.device_names import describe_device
from molink.stage.diagnostics.kernel_trials import (
    KernelTrial,
    extra_trials,
    kernel_chains,
    supported_dtypes,
)
from molink.stage.diagnostics.trial_shapes import USUAL_SHAPES, TrialShapes
from molink.stage.gpu_kernels.triton_support import find_triton_problem


def run_trials(
    device: torch.device, skip: Collection[str] = (), shapes: TrialShapes = USUAL_SHAPES
) -> Iterator[KernelTrial]:
    """Run all trials on ``device`` but those in ``skip``."""
    for dtype in supported_dtypes(device):
        found: dict[str, KernelTrial] = {}
        for mode in ("int8", "nf4"):
            for chain in kernel_chains(shapes, dtype, mode, device):
                # The fallbacks of int8 and nf4 are trials of their own.
                found |= {f"{one.kernel} {mode * (one.kernel == 'unpacked')}": one for one in chain}
        for trial in (*found.values(), *extra_trials(dtype, device)):
            if trial.kernel not in skip:
                yield trial


def describe_torch() -> dict[str, Any]:
    """Describe torch and its usable GPUs; ``reason`` says why there are none.

    ``triton_problem`` says why Triton's kernels can't be used, if so.
    """
    report: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
    report |= {"reason": "", "kernels_for": [], "triton_problem": find_triton_problem()}
    try:
        if torch.version.cuda is not None:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            report["kernels_for"] = torch.cuda.get_arch_list()
    except (RuntimeError, AssertionError) as error:
        return report | {"reason": str(error).strip()[:300]}
    for index in range(torch.cuda.device_count() if torch.version.cuda is not None else 0):
        major, minor = torch.cuda.get_device_capability(index)
        card = {"name": torch.cuda.get_device_name(index), "capability": f"{major}.{minor}"}
        report["gpus"].append(card)
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all trials."""
    parser = argparse.ArgumentParser(
        prog="python -m molink.stage.diagnostics.parity", description=__doc__
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0 = torch's default")
    parser.add_argument("--model", type=Path, help="try the shapes of this model's layers")
    parser.add_argument("--skip", default="", help="kernels, separated by commas")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    _print_line(about=describe_torch())
    device = pick_device(options.device)
    _print_line(device=str(device), name=describe_device(device))
    shapes = _load_shapes(options.model, device)
    for trial in run_trials(device, options.skip.split(","), shapes):
        _print_line(begin={"kernel": trial.kernel, "dtype": trial.dtype})
        _print_line(result=trial.run_trial())


def _load_shapes(model: Path | None, device: torch.device) -> TrialShapes:
    """Load a model's shapes; typical shapes without a model or if its config can't be read."""
    paged = device.type == "cuda" and find_kernel() is not None
    usual = replace(USUAL_SHAPES, block_size=PAGE_MULTIPLE) if paged else USUAL_SHAPES
    if model is None:
        return usual
    try:
        config = ModelConfig.load_folder(model)
    except MolinkError as error:
        print(f"not tested with the shapes of {model}: {error}", file=sys.stderr)
        return usual
    return TrialShapes.from_config(config, usual.block_size, device)


def _print_line(**report: Any) -> None:
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
