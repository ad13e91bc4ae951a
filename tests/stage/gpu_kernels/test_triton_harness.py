"""Tests of the Triton harness: its results are right, and it finds what a device can't run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from molink.stage.gpu_kernels import triton_support
from molink.stage.gpu_kernels.triton_support import describe_triton
from tests.support.triton_device import DEVICE, needs_triton
from tests.support.triton_targets import TARGETS, compile_in_child

pytestmark = needs_triton


def test_kernels_run_here() -> None:
    from tests.support.sample_kernels import add_vectors

    one, other = torch.randn(2, 100, device=DEVICE)
    assert torch.equal(add_vectors(one, other), one + other)


def test_a_broken_triton_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"Triton \d+\.\d+.*", describe_triton())
    monkeypatch.setattr(triton_support, "find_triton_problem", lambda: "")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert describe_triton().startswith("no Triton: import of triton halted")


def test_what_a_device_cannot_run_is_told() -> None:
    compiled = compile_in_child("--all", "tests.support.sample_kernels")
    names = ("add_kernel", "greedy_kernel", "unknown_kernel")
    problems = {
        (name, one.capability): one.problem
        for one in compiled
        for name in names
        if name in one.kernel
    }
    # The same launch is compiled once.
    assert len(problems) == len(compiled) == len(names) * len(TARGETS)
    oldest, newest = min(TARGETS), max(TARGETS)
    assert (problems["add_kernel", oldest], problems["add_kernel", newest]) == ("", "")
    assert "shared memory" in problems["greedy_kernel", newest]
    for device in (oldest, newest):
        assert "no_such_operator" in problems["unknown_kernel", device]


def test_a_worker_on_a_cpu_imports_no_triton(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "import molinkd.worker.engine_loader\n"
        "from molink.checkpoint.model_folder import ModelFolder\n"
        "from molink.checkpoint.model_source import find_demo_model\n"
        "from molink.stage.diagnostics.kernel_checks import check_kernels\n"
        "from molink.stage.stage import Stage\n"
        "folder = ModelFolder.open(find_demo_model().path)\n"
        "given = torch.device('cpu'), 'auto', 'none', 16\n"
        "check_kernels(Path(sys.argv[1]), folder, *given)\n"
        "Stage.load_layers(folder, (0, 1), 'cpu').allocate_kv_pool(4, 16)\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "checks.json")], check=True)
