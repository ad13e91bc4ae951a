"""Runs the kernels' tests again on an emulated CPU without AVX-512."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from molink.cpu_isa import AVX2_ONLY, avx2_only
from molink.stage.cpu_kernels.compiler import host_features

ROOT = Path(__file__).resolve().parents[2]
#: Tests that depend on the CPU, other than those that compile for AVX2 anyway.
FILES = (
    "linear",
    "diagnostics/test_parity.py",
    "diagnostics/test_kernel_checks.py",
    "decoder/test_norm.py",
    "attention/test_compiled.py::test_memory_of_a_stage",
    "attention/test_compiled.py::test_results_that_are_off_are_not_used",
    "test_compiled.py",
    "test_torch_dtypes.py",
)
#: Allowed reasons of skipped tests.
_REASONS = re.compile(r"avx512|AVX512|AVX-512|CUDA device")


@pytest.mark.timeout(900)
def test_kernels_pass_on_avx2(tmp_path: Path) -> None:
    if avx2_only():
        pytest.skip("MOLINK_CPU_ISA is set: all tests run this way")
    if not host_features().get("avx512f"):
        pytest.skip("this CPU has no AVX-512: all tests run this way")
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    options = ("-q", "-rs", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'child'}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/stage/{name}" for name in FILES)],
        cwd=ROOT,
        env={**kept, **AVX2_ONLY},
        capture_output=True,
        encoding="utf-8",
        timeout=880,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert skipped
    assert [line for line in skipped if not _REASONS.search(line)] == []
