"""bitsandbytes is imported late, and fetches no code."""

import subprocess
import sys
from pathlib import Path

import pytest

from molink.errors import UsageError
from molink.stage.linear.nf4 import load_library

#: The part of the `kernels` package that bitsandbytes uses.
FETCHER = """
print("FETCHED")
def get_kernel(*args, **options):
    print("FETCHED")
    raise SystemExit(9)
"""


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    (folder / "kernels.py").write_text(FETCHER, encoding="utf-8")
    # These processes only import, which is faster without garbage collection.
    begin = f"import gc, sys; gc.disable(); sys.path.insert(0, {str(folder)!r})\n"
    command = [sys.executable, "-c", begin + script]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_no_code_is_fetched_although_a_fetching_package_is_installed(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "import logging; logging.basicConfig()\n"
        "import molink.stage.stage\n"
        "assert 'bitsandbytes' not in sys.modules, 'imported before it is needed'\n"
        "from molink.stage.linear.nf4 import load_library\n"
        "load_library()\n"
        "assert 'kernels' not in sys.modules\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_package_can_still_be_used_by_others_and_what_was_fetched_before_is_dropped(
    tmp_path: Path,
) -> None:
    done = run(
        tmp_path,
        "import logging\n"
        "sys.modules['kernels'] = None\n"
        "logging.disable()\n"
        "import bitsandbytes.backends.cpu.ops as on_cpu\n"
        "logging.disable(logging.NOTSET)\n"
        "on_cpu.gemm_4bit_forward_kernel = print\n"
        "del sys.modules['kernels']\n"
        "import kernels\n"
        "from molink.stage.linear.nf4 import load_library\n"
        "load_library()\n"
        "assert sys.modules['kernels'] is kernels\n"
        "assert on_cpu.gemm_4bit_forward_kernel is None\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "FETCHED\n", "")


def test_missing_bitsandbytes_is_reported_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UsageError, match="molink setup"):
        load_library()
