"""The options of ``molink simulate``, in the order of its help."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from molink.facts.settings import PreemptionMode

Trace = Annotated[
    Path | None,
    typer.Option(help="Sizes from an Azure (.csv) or Mooncake (.jsonl) trace.  [default: none]"),
]
Rate = Annotated[float, typer.Option(help="Mean requests per second.")]
Duration = Annotated[float, typer.Option(help="Seconds in which requests arrive.")]
Warmup = Annotated[float, typer.Option(help="Uncounted seconds before that.")]
Arrivals = Annotated[
    Literal["poisson", "trace"],
    typer.Option(help="Poisson arrivals, or the trace's times scaled to --rate."),
]
MaxTokens = Annotated[int, typer.Option(help="Skip longer requests of the trace.")]
InputTokens = Annotated[
    int | None, typer.Option(help="Prompt tokens without a trace.  [default: 512]")
]
OutputTokens = Annotated[
    int | None, typer.Option(help="Answer tokens without a trace.  [default: 128]")
]
Seed = Annotated[int, typer.Option(help="Seed of the arrivals.")]

Stages = Annotated[int, typer.Option(help="Stages of the ring.")]
Device = Annotated[str, typer.Option(help="Device of every stage: a name or a .toml file.")]
ModelProfile = Annotated[str, typer.Option(help="Model: a name or a .toml file.")]
Link = Annotated[str, typer.Option(help="Links between stages: a name or a .toml file.")]
Bandwidth = Annotated[
    float | None, typer.Option(help="Link bandwidth in Mbps.  [default: the link's]")
]
Latency = Annotated[
    float | None,
    typer.Option(help="One-way link latency in milliseconds.  [default: the link's]"),
]
Congestion = Annotated[
    Literal["none", "cubic", "bbr"] | None,
    typer.Option(help="TCP congestion control.  [default: the link's, else none]"),
]
MaxNumSeqs = Annotated[int, typer.Option(help="Maximum running requests.")]

Pipelines = Annotated[
    int | None, typer.Option(help="Rings that share the requests.  [default: 1, no fleet]")
]
Peers = Annotated[
    int | None, typer.Option(help="Number of PCs.  [default: --pipelines x --stages]")
]
PeersPerUplink = Annotated[int | None, typer.Option(help="PCs per uplink.  [default: 1]")]
Router = Annotated[
    str | None,
    typer.Option(help="Request router: round-robin, least-loaded, e2.  [default: least-loaded]"),
]
Churn = Annotated[
    float | None, typer.Option(help="Mean departures of a PC per hour.  [default: 0]")
]
Away = Annotated[float | None, typer.Option(help="Mean seconds of absence.  [default: 600]")]

Policy = Annotated[str, typer.Option(help="Link policies, comma separated.")]
SchedulingPolicy = Annotated[str, typer.Option(help="Scheduling policy.")]
Preemption = Annotated[
    PreemptionMode, typer.Option("--preemption-mode", help="KV of preempted requests.")
]
CutThrough = Annotated[bool, typer.Option(help="Forward prefill rows while more arrive.")]
Compression = Annotated[
    Literal["none", "lossless"], typer.Option(help="Compression of rows between stages.")
]
MicroBatches = Annotated[str, typer.Option(help="Micro-batches in flight: a number or auto.")]
PrefillOnlyBatches = Annotated[
    bool, typer.Option(help="Issue prefill chunks without decode rows too.")
]
MaxNumBatchedTokens = Annotated[str, typer.Option(help="Maximum prefill rows per batch, or auto.")]
Tensors = Annotated[
    int, typer.Option(min=1, max=2, help="Tensors per row and hop; 2 as in vLLM 0.7.")
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Timeline = Annotated[
    Path | None, typer.Option(help="Draw computation and transfers to this .svg.  [default: none]")
]
Window = Annotated[str | None, typer.Option(help="Seconds A:B of the timeline.  [default: all]")]
Replay = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        help="Only replay a recording of a link's decisions and compare.  [default: none]",
    ),
]
