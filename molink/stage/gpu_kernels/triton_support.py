"""Detects whether Triton can be used; CPUs don't need it."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path


def find_triton_problem() -> str:
    """Explain why Triton can't compile kernels on this PC; empty if it can.

    On Linux Triton builds its launcher with the PC's C compiler and Python's headers;
    ``triton-windows`` includes both.
    """
    if importlib.util.find_spec("triton") is None:
        return "it is not installed"
    if sys.platform == "win32" or is_interpreted():
        return ""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python's headers are missing"
    return ""


def describe_triton() -> str:
    """Return Triton's version, or why it can't be used."""
    problem = find_triton_problem()
    if problem:
        return f"no Triton: {problem}"
    try:
        import triton
    except Exception as error:  # a broken installation may raise anything
        return f"no Triton: {error}"
    return f"Triton {triton.__version__}"


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter on the CPU, as in tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
