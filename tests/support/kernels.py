"""Requirements of compiled kernels on the CPU and torch; tests are skipped without them."""

from collections.abc import Collection

import pytest

from molink.stage.cpu_kernels.compiler import host_features
from molink.stage.cpu_kernels.openmp import OpenMp

#: Why tests that need compiled products for rows of a type are skipped.
NOT_COMPILED = {
    "bf16": "this CPU has no AVX512-BF16: rows are float32",
    "f32": "this CPU has neither AVX2 nor AVX-512",
}


def require(features: Collection[str], threads: int) -> OpenMp | None:
    """The OpenMP library for ``threads``, ``None`` for one; skips if something is missing."""
    missing = [name for name in features if not host_features().get(name)]
    if missing:
        pytest.skip(f"this CPU has no {', '.join(missing)}")
    openmp = OpenMp.find_loaded() if threads > 1 else None
    if threads > 1 and openmp is None:
        pytest.skip("torch has loaded no OpenMP library that is known")
    return openmp
