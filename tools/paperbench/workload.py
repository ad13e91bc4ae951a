"""The paper's workload: Azure's conversation trace, bounded in sizes."""

import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from molink.bench.workload import TraceRow
from molink.errors import UsageError
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.workload import Workload
from tools.paperbench.published import DEVICE, MAX_OUTPUT, MAX_PROMPT, MODEL, STAGES, Setting
from tools.paperbench.variants import Variant

#: File names of the trace.
TRACE_NAMES = ("AzureLLMInferenceTrace_conv.csv", "azure_llm_2023_conv.csv")
#: Folders searched here and in all parents.
TRACE_FOLDERS = ("traces", "shared/traces")
#: Environment variable that names the trace.
TRACE_VARIABLE = "MOLINK_TRACE"


def find_trace(given: Path | None) -> Path:
    """Find the trace: given, named by the environment, or nearby.

    Raises:
        UsageError: not found.
    """
    if given is not None:
        return given
    if where := os.environ.get(TRACE_VARIABLE):
        return Path(where)
    here = Path.cwd()
    for folder, inner, name in product((here, *here.parents), TRACE_FOLDERS, TRACE_NAMES):
        if (path := folder / inner / name).is_file():
            return path
    raise UsageError(
        f"no trace: give --trace FILE or {TRACE_VARIABLE}=FILE. It is {TRACE_NAMES[0]} of"
        " https://github.com/Azure/AzurePublicDataset (AzureLLMInferenceDataset2023)"
    )


def make_workload(
    trace: Sequence[TraceRow], setting: Setting, warmup: float, duration: float, seed: int = 0
) -> Workload:
    """Poisson arrivals of a sample spaced evenly over the trace, so that sizes are typical."""
    fitting = [
        row for row in trace if row.input_tokens <= MAX_PROMPT and row.output_tokens <= MAX_OUTPUT
    ]
    expected = setting.rate * (warmup + duration)
    step = max(1, int(len(fitting) / (1.5 * expected + 8)))
    return Workload(
        setting.rate,
        duration,
        warmup,
        trace_rows=tuple(fitting[::step]),
        seed=seed,
        max_prompt=MAX_PROMPT,
        max_output=MAX_OUTPUT,
    )


def make_scenario(
    workload: Workload,
    setting: Setting,
    variant: Variant,
    congestion: str = "none",
    handling_ms: float = 0.0,
) -> Scenario:
    """The simulator's scenario; the last two as in :class:`LinkProfile`."""
    return Scenario(
        workload,
        STAGES,
        DEVICE,
        MODEL,
        LinkProfile(
            setting.mbps, setting.latency_ms, congestion=congestion, handling_ms=handling_ms
        ),
        variant.policy,
        variant.cut_through,
        variant.compression,  # type: ignore[arg-type]
        variant.micro_batches,
        variant.tensors,
        variant.max_num_batched_tokens,
        prefill_only_batches=variant.prefill_only,
    )
