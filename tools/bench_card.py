"""A stage on a CUDA card: steps with and without graphs, waits, memory beside its plan.

    python -m tools.bench_card FOLDER --json           # for example of tools.make_bench_model

``steps``: a decode step, as ``molink bench stage`` measures it, with and without a graph, and the
time of the graph's capture. ``torch_rows``: the same without fused norms, gates and heads.
``waits``: how often sampling waits for the device, and its time. ``memory``: the plan for a budget
beside the use of a largest step with a full pool. KV blocks are shuffled. Needs about 14 GB of GPU
memory.
"""

import argparse
import json
import random
import statistics
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.footprint import StageSetup, StepLimits
from molink.facts.memory_plan import plan_memory
from molink.facts.model import BLOCK_SIZE, Quantize
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.diagnostics.stage_passes import StagePasses
from molink.stage.sampling.create import create_draws
from molink.stage.sampling.logits_processors import SampleRow
from molink.stage.sampling.sampler import sample_tokens
from molink.stage.stage import Stage
from molink.wire.messages.data_plane import SamplingParams

#: Rows of a decode step, and context tokens per row.
_STEPS = ((1, 128), (1, 2000), (4, 128), (8, 128), (8, 1000), (16, 128), (32, 500), (64, 128))
_KV_BYTES = 1 << 30
_BUDGET = 12 * 10**9
_FIRST, _REPEATS = 5, 20
_SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "any token": SamplingParams(temperature=1.0, seed=1),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    "top_p and logprobs": SamplingParams(temperature=0.8, top_p=0.9, seed=1, logprobs=5),
}
#: Logits fall with the logarithm of a token's rank, as in trained models.
_STEEPNESS, _VOCABULARY = 2.0, 151_936


@dataclass(frozen=True, slots=True)
class Card:
    """A model folder and the measured card."""

    folder: ModelFolder
    device: torch.device

    def load(self, quantize: Quantize, avoid: Collection[str] = ()) -> Stage:
        """The whole model as one stage, without kernels ``avoid``."""
        layers = (0, self.folder.config.layers)
        return Stage.load_layers(
            self.folder, layers, str(self.device), quantize=quantize, disabled_kernels=avoid
        )

    def seconds(self, work: Callable[[], object]) -> float:
        """Time ``work``, including the device."""
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin

    def milliseconds(self, work: Callable[[], object]) -> float:
        """Median of several runs."""
        return 1e3 * statistics.median(self.seconds(work) for _ in range(_REPEATS))


class Tables:
    """Shuffled block tables in a pool of ``blocks``."""

    def __init__(self, blocks: int) -> None:
        self._order = list(range(blocks))
        random.Random(0).shuffle(self._order)

    def rows(self, start: int, count: int, request: int) -> SequenceRows:
        """Rows of a request; requests share blocks if the pool is too small."""
        each = -(-(start + count) // BLOCK_SIZE)
        places = range(request * each, (request + 1) * each)
        return SequenceRows(start, count, [self._order[i % len(self._order)] for i in places])

    def decode(self, rows: int, context: int, vocabulary: int) -> StageInput:
        """One decode row for each of ``rows`` requests."""
        sequences = tuple(self.rows(context, 1, request) for request in range(rows))
        return StageInput(_draw_tokens(rows, vocabulary), None, sequences, tuple(range(rows)))


def _draw_tokens(count: int, vocabulary: int) -> Tensor:
    return torch.arange(count) * 7919 % vocabulary


def measure_steps(
    card: Card, quantize: Quantize, avoid: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Measure decode steps of several sizes, without kernels ``avoid``."""
    found = []
    stages = card.load(quantize, avoid), card.load(quantize, avoid)
    passes = [StagePasses(stage, _KV_BYTES, BLOCK_SIZE) for stage in stages]
    with passes[0] as with_graphs, passes[1] as eager:
        stages[1]._graphs = None
        for rows, context in _STEPS:
            step = partial(with_graphs.run_decode, rows, context)
            eager_step = partial(eager.run_decode, rows, context)
            before = stages[0].graph_bytes
            step()
            captured = card.seconds(partial(stages[0].capture_graph, rows, context + 1))
            eager_step()
            found.append(
                {
                    "rows": rows,
                    "context": context,
                    "ms": card.milliseconds(step),
                    "eager_ms": card.milliseconds(eager_step),
                    "capture_ms": 1e3 * captured,
                    "graph_bytes": stages[0].graph_bytes - before,
                }
            )
    return found


def measure_waits(card: Card) -> list[dict[str, Any]]:
    """Measure sampling of 1 and 16 rows."""
    generator, found = torch.Generator().manual_seed(0), []
    draw_rows = create_draws(card.device)
    fall = -_STEEPNESS * torch.arange(1, _VOCABULARY + 1).log()
    for count in (1, 16):
        each = [fall[torch.randperm(_VOCABULARY, generator=generator)] for _ in range(count)]
        logits = torch.stack(each).to(card.device)
        for name, sampling in _SAMPLINGS.items():
            rows = [SampleRow(sampling, position) for position in range(count)]

            def draw(rows: list[SampleRow] = rows, logits: Tensor = logits) -> object:
                return sample_tokens(logits, rows, draw_rows=draw_rows)

            draw()
            waits, taken = _count_waits(draw), card.milliseconds(draw)
            found.append({"sampling": name, "rows": count, "waits": waits, "ms": taken})
    return found


def _count_waits(work: Callable[[], object]) -> int:
    """Count host waits that torch reports."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in seen)


def measure_memory(card: Card, quantize: Quantize) -> dict[str, Any]:
    """Plan a budget as a daemon does, and measure its use."""
    torch.cuda.empty_cache()
    folder, chunk, decodes = card.folder, StepLimits().max_chunk_rows, StepLimits().max_decode_rows
    layers = (0, folder.config.layers)
    setup = StageSetup("cuda", True, "auto", quantize)
    plan = plan_memory(folder.placement_facts("bench"), layers, setup, _BUDGET)
    before = torch.cuda.memory_allocated(card.device)
    stage = card.load(quantize)
    weights = torch.cuda.memory_allocated(card.device) - before
    blocks = plan.kv // stage.block_bytes(BLOCK_SIZE)
    stage.allocate_kv_pool(blocks, BLOCK_SIZE)
    tables, config = Tables(blocks), folder.config
    for _ in range(_FIRST):
        stage.forward(tables.decode(decodes, 128, config.vocab_size))
    # A prompt's last chunk beside the most streams, which fill the pool.
    prompt = tables.rows(config.max_model_len - chunk, chunk, 0)
    each = min(config.max_model_len, blocks * BLOCK_SIZE // decodes) - BLOCK_SIZE
    streams = tables.decode(decodes, each, config.vocab_size).sequences
    tokens = _draw_tokens(chunk + decodes, config.vocab_size)
    wanted = range(chunk - 1, chunk + decodes)
    held = torch.cuda.memory_allocated(card.device)
    torch.cuda.reset_peak_memory_stats(card.device)
    stage.forward(StageInput(tokens, None, (prompt, *streams), tuple(wanted)))
    torch.cuda.synchronize(card.device)
    free, total = torch.cuda.mem_get_info(card.device)
    return {
        "planned": {name: getattr(plan, name) for name in plan.__dataclass_fields__},
        "weights": weights,
        "activations": torch.cuda.max_memory_allocated(card.device) - held,
        "graphs": stage.graph_bytes,
        "kv": blocks * stage.block_bytes(BLOCK_SIZE),
        "reserved_by_torch": torch.cuda.memory_reserved(card.device),
        "beside_torch": total - free - torch.cuda.memory_reserved(card.device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quantize", choices=("none", "int8", "nf4"), nargs="+", default=["none"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    card = Card(ModelFolder.open(options.folder), torch.device(options.device))
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(card.device),
        "torch": torch.__version__,
        "model": options.folder.name,
        "memory": {mode: measure_memory(card, mode) for mode in options.quantize},
        "steps": {mode: measure_steps(card, mode) for mode in options.quantize},
        "torch_rows": {
            mode: measure_steps(card, mode, ("compiled-rows",)) for mode in options.quantize
        },
        "waits": measure_waits(card),
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for mode in options.quantize:
        print(f"memory, {mode}: {result['memory'][mode]}")
        for one in result["steps"][mode]:
            print(f"{mode}: {one}")
        for one in result["torch_rows"][mode]:
            print(f"{mode}, torch's rows: {one}")
    for one in result["waits"]:
        print(one)


if __name__ == "__main__":
    main()
