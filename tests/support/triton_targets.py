"""Compiles launches of GPU kernels for named devices on a PC without a GPU.

Run as ``python -m tests.support.triton_targets [--all] MODULE …`` in a process without Triton's
interpreter. Each module has ``LAUNCHES``: functions without arguments that launch kernels with
tensors on the CPU. Nothing is launched; what would be is compiled, down to machine code. With
``--all`` that is every launch for all :data:`TARGETS`, otherwise one of each kernel for the oldest
device, and every eighth launch for one of the newer ones, in turn. Prints a line of JSON per kernel
and device.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, product
from typing import Any, NamedTuple
from unittest import mock

#: Compute capabilities, and bytes of shared memory that a block may have there.
TARGETS = {
    75: 64 << 10,  # RTX 20
    80: 163 << 10,  # A100
    86: 99 << 10,  # RTX 30
    89: 99 << 10,  # RTX 40
    90: 227 << 10,  # H100
    120: 99 << 10,  # RTX 50
}


class Compiled(NamedTuple):
    """One kernel for one compute capability; ``shared`` are bytes of shared memory."""

    kernel: str
    capability: int
    shared: int
    seconds: float
    error: str = ""

    @property
    def problem(self) -> str:
        """Why it can't run on that device; empty if it can."""
        if self.error or self.shared <= TARGETS[self.capability]:
            return self.error
        return f"{self.shared} bytes of shared memory"


def compile_in_child(*arguments: str) -> list[Compiled]:
    """Compile in a process of its own, with :func:`main`'s arguments."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.triton_targets", *arguments]
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Compiled(*json.loads(line)) for line in done.stdout.splitlines()]


class _Launch(NamedTuple):
    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def record_launches(launches: list[Callable[[], object]]) -> list[_Launch]:
    """What the functions launch; nothing runs."""
    from triton.runtime.jit import JITFunction

    found: list[_Launch] = []

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(_Launch(self, arguments, options))

    with mock.patch.object(JITFunction, "run", record):
        for launch in launches:
            launch()
    return found


def compile_launch(launch: _Launch, capability: int, seen: set[str]) -> Compiled | None:
    """Compile a launch for a device; ``None`` if an equal one was compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, target = launch.kernel, GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {"debug": False, **launch.options}
    bound, specialization, options = bind(*launch.arguments, **given)
    options, signature, constants, attributes = kernel._pack_args(
        backend, given, bound, specialization, options
    )
    key = f"{kernel.fn.__qualname__} {signature} {constants} {attributes} {options} {capability}"
    if key in seen:
        return None
    seen.add(key)
    values = {kernel.arg_names[path[0]]: value for path, value in constants.items()}
    name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__} {values}"
    begin = time.perf_counter()
    try:
        source = ASTSource(kernel, signature, constants, attributes)
        shared = triton.compile(source, target=target, options=options.__dict__).metadata.shared
    except Exception as error:  # compilers may raise anything
        return Compiled(name, capability, 0, time.perf_counter() - begin, str(error)[-2000:])
    return Compiled(name, capability, shared, time.perf_counter() - begin)


def main() -> None:
    """Compile the launches of the modules that are named on the command line."""
    modules = [argument for argument in sys.argv[1:] if argument != "--all"]
    launches = [launch for name in modules for launch in importlib.import_module(name).LAUNCHES]
    recorded, seen = record_launches(launches), set[str]()
    if "--all" in sys.argv:
        wanted = list(product(recorded, TARGETS))
    else:
        oldest, *newer = sorted(TARGETS)
        one_each = {launch.kernel: launch for launch in recorded}.values()
        wanted = [(launch, oldest) for launch in one_each]
        wanted += zip(recorded[::8], cycle(reversed(newer)), strict=False)
    for launch, capability in wanted:
        made = compile_launch(launch, capability, seen)
        if made is not None:
            print(json.dumps(made), flush=True)


if __name__ == "__main__":
    main()
