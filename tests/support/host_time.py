"""Host time of decode steps that are CUDA graphs, with sampling, on a PC without a GPU.

Run as ``python -m tests.support.host_time``; building the pretend card takes a minute. Layers are
not computed, and no other kernel has much to do: what remains is what Python and torch take to
prepare, launch and read a step. A launch costs what torch's fallback to the CPU costs, not what
CUDA's does. Prints per kind of step the median microseconds with a small vocabulary, and the
operators that a card would run with a usual one; copies to it and from it are counted alone.
"""

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from molink.checkpoint.model_folder import ModelFolder
from molink.ring.step import StepInput
from molink.stage import stage as stages
from molink.stage.attention.triton_attention import TileLaunch, TritonAttention
from molink.stage.device_copy import has_pinned
from molink.stage.gpu_kernels import sampling_kernels
from molink.stage.sampling import create as sampling
from molink.stage.stage import Stage
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import Admit, RequestSlice, Volume
from molinkd.worker.request_table import RequestTable
from molinkd.worker.step import run_step
from tests.support.fake_cuda import CUDA, SAMPLINGS, Host, build, install_fake
from tests.support.models import write_model

#: Rows and context of steps, and how they are sampled.
STEPS = (
    (1, 128, "greedy"),
    (16, 128, "greedy"),
    (64, 128, "greedy"),
    (8, 8000, "greedy"),
    (1, 128, "top_p"),
    (64, 128, "top_p"),
)
PAGE, BLOCKS = 16, 4200
#: Sampling looks for the likeliest tokens as in larger vocabularies from the second on.
SMALL, USUAL = 384, 33_280
RUNS = 200


class Operators(TorchDispatchMode):
    """Counts operators that a card would run or be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        result = function(*given, **(named or {}))
        tensors = [one for one in (result, *given) if isinstance(one, Tensor)]
        is_free = "empty" in str(function) or (
            function.is_view and getattr(result, "device", None) in (None, given[0].device)
        )
        if not is_free and any(one.device == CUDA for one in tensors):
            self.seen[_classify(function, given, result)] += 1
        return result


def _classify(function: Any, given: Sequence[Any], result: Any) -> str:
    name = function.overloadpacket.__name__
    if name not in ("copy_", "to", "_to_copy"):
        return "launches"
    source = given[1] if name == "copy_" else given[0]
    if source.device != CUDA:
        return "uploads"
    return "launches" if result.device == CUDA else "downloads"


def prepare_stage(folder: Path, vocabulary: int) -> Stage:
    """A model as one stage whose graphs compute nothing."""
    fields = {"num_hidden_layers": 1, "vocab_size": vocabulary, "max_position_embeddings": 8192}
    stage = Stage.load_layers(
        ModelFolder.open(write_model(folder, "llama", **fields)),
        (0, 1),
        "cuda:0",
        "f32",
        disabled_kernels=("compiled-rows", "flash-attention"),
    )
    stage.allocate_kv_pool(BLOCKS, PAGE)
    for rows in sorted({rows for rows, *_ in STEPS}):
        stage.capture_graph(rows, 8100)
    made: Any = stage._graphs
    made._graphs = {
        bucket: replace(graph, replay=lambda: None) for bucket, graph in made._graphs.items()
    }
    assert {bucket.rows for bucket in made._graphs} == {rows for rows, *_ in STEPS}
    return stage


def make_step(stage: Stage, rows: int, context: int, kind: str) -> Callable[[], object]:
    """A decode step and its sampling, as a worker runs them; each begins a block."""
    each = context // PAGE + 1
    requests = RequestTable()
    for row in range(rows):
        requests.admit_request(Admit(0, row, SAMPLINGS[kind], context))
        requests.append_blocks(row, range(row * each, (row + 1) * each))
    slices = tuple(RequestSlice(row, context, 1, 0, sample=True) for row in range(rows))
    step_inputs = (StepInput(Volume(1, False, slices, Payload("f32", (0, 0))), [7] * rows),)
    return lambda: run_step(stage, requests, step_inputs)


def draw_first(logits: Tensor, settings: Tensor, masks: Tensor | None) -> Tensor:
    """Stands in for the kernel with one launch: every row is usable and has token 1."""
    return logits.new_ones(len(logits), 2, dtype=torch.int64)


def measure(run: Callable[[], object]) -> float:
    """Median microseconds."""
    taken = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        run()
        taken.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(taken)


def main() -> None:
    """Print a line per kind of step."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        library = Path(sys.argv[1]) if len(sys.argv) > 1 else build(Path(made))
        host = Host(library)
        install_fake(stack, host, (8, 6))
        assert has_pinned(CUDA)
        for place, name, stand_in in (
            (stages, "create_attention", lambda _, shape, *given: TritonAttention(shape)),
            (TileLaunch, "attend_rows", lambda *given: None),
            (sampling, "_check_draws", lambda _: True),
            (sampling_kernels, "draw_tokens", draw_first),
        ):
            stack.enter_context(mock.patch.object(place, name, stand_in))
        small, usual = (prepare_stage(Path(made) / str(size), size) for size in (SMALL, USUAL))
        for rows, context, kind in STEPS:
            run = make_step(usual, rows, context, kind)
            run()
            with Operators() as counted:
                run()
            print(
                f"{rows:3} rows, {context:5} positions, {kind:7}:",
                f"{measure(make_step(small, rows, context, kind)):6.0f} us,",
                ", ".join(f"{counted.seen[name]} {name}" for name in sorted(counted.seen)),
                flush=True,
            )


if __name__ == "__main__":
    main()
