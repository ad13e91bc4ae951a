"""``MOLINK_CPU_ISA`` limits libraries and molink's own kernels to AVX2."""

import json
import os
import subprocess
import sys

import pytest

from molink import cpu_isa
from molink.cpu_isa import AVX2_ONLY, avx2_only, limit_libraries

LIBRARIES = {"ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"}
#: Queries of the CPU, in a child process: libraries read their variables once.
ASKS = """
import json, torch
from molink.stage.cpu_kernels.compiler import host_features
from molink.stage.linear import can_pack
from molink.stage.linear.int8 import has_onednn_int8
from molink.stage.linear.nf4 import has_nf4_kernel
from molink.stage.diagnostics.device_names import describe_instructions
from molink.stage.torch_dtypes import choose_dtype
cpu = torch.device("cpu")
beyond = [name for name, on in host_features().items() if on and name.startswith("avx512")]
print(json.dumps({
    "beyond": beyond, "packs": can_pack(torch.bfloat16, cpu), "int8": has_onednn_int8(),
    "nf4": has_nf4_kernel(), "dtype": choose_dtype("auto", "bf16", cpu),
    "instructions": describe_instructions(cpu),
}))
"""


def test_nothing_is_changed_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_isa.platform, "machine", lambda: "AMD64")
    environment: dict[str, str] = {"MOLINK_CPU_ISA": ""}
    limit_libraries(environment)
    assert not avx2_only(environment)
    assert environment.keys().isdisjoint(LIBRARIES)


@pytest.mark.parametrize(("machine", "told"), [("AMD64", LIBRARIES), ("arm64", set())])
def test_libraries_are_told(monkeypatch: pytest.MonkeyPatch, machine: str, told: set[str]) -> None:
    monkeypatch.setattr(cpu_isa.platform, "machine", lambda: machine)
    environment = dict(AVX2_ONLY)
    limit_libraries(environment)
    assert avx2_only(environment)
    assert environment.keys() == {*AVX2_ONLY, *told}


def test_another_value_is_refused() -> None:
    with pytest.raises(ValueError, match="MOLINK_CPU_ISA is 'avx512'; it must be 'avx2' or unset"):
        limit_libraries({"MOLINK_CPU_ISA": "avx512"})


def test_whoever_asks_sees_no_avx_512() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", ASKS],
        env={**os.environ, **AVX2_ONLY},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    told = json.loads(asked.stdout)
    assert "bf16" not in told.pop("instructions")
    assert told == {"beyond": [], "packs": False, "int8": False, "nf4": False, "dtype": "f32"}
