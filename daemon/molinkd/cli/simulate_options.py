"""The options of ``molink simulate``, in the order of its help."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from molink.facts.settings import PreemptionMode

Trace = Annotated[
    Path | None,
    typer.Option(help="Sizes from an Azure (.csv) or Mooncake (.jsonl) trace.  [default: none]"),
]
Rate = Annotated[float, typer.Option(help="Requests per second, on average.")]
Duration = Annotated[float, typer.Option(help="Seconds in which requests arrive.")]
Warmup = Annotated[float, typer.Option(help="Seconds before that; requests are not counted.")]
Arrivals = Annotated[
    Literal["poisson", "trace"],
    typer.Option(help="At random, or when the trace says, stretched to --rate."),
]
MaxTokens = Annotated[int, typer.Option(help="Longer ones of the trace are left out.")]
InputTokens = Annotated[
    int | None, typer.Option(help="Per prompt, without a trace.  [default: 512]")
]
OutputTokens = Annotated[
    int | None, typer.Option(help="Per answer, without a trace.  [default: 128]")
]
Seed = Annotated[int, typer.Option(help="Of the arrivals.")]

Stages = Annotated[int, typer.Option(help="Of the ring.")]
Device = Annotated[str, typer.Option(help="Of every stage: a name or a .toml file.")]
ModelProfile = Annotated[str, typer.Option(help="A name or a .toml file.")]
Link = Annotated[str, typer.Option(help="Between the stages: a name or a .toml file.")]
Bandwidth = Annotated[
    float | None, typer.Option(help="Mbps, instead of the link's.  [default: the link's]")
]
Latency = Annotated[
    float | None,
    typer.Option(help="Milliseconds one way, instead of the link's.  [default: the link's]"),
]
Congestion = Annotated[
    Literal["none", "cubic", "bbr"] | None,
    typer.Option(
        help="TCP's congestion control, instead of the link's.  [default: the link's, else none]"
    ),
]
MaxNumSeqs = Annotated[int, typer.Option(help="Requests that hold KV blocks at once.")]

Pipelines = Annotated[
    int | None, typer.Option(help="Rings that share the requests.  [default: 1, no fleet]")
]
Peers = Annotated[int | None, typer.Option(help="PCs in all.  [default: --pipelines x --stages]")]
PeersPerUplink = Annotated[int | None, typer.Option(help="PCs behind one router.  [default: 1]")]
Router = Annotated[
    str | None,
    typer.Option(
        help="Who gets a request: round-robin, least-loaded, e2.  [default: least-loaded]"
    ),
]
Churn = Annotated[
    float | None, typer.Option(help="Times that a PC leaves in an hour, on average.  [default: 0]")
]
Away = Annotated[
    float | None, typer.Option(help="Seconds that it is away, on average.  [default: 600]")
]

Policy = Annotated[str, typer.Option(help="How links send; several separated by commas.")]
SchedulingPolicy = Annotated[str, typer.Option(help="Whose turn it is among requests.")]
Preemption = Annotated[
    PreemptionMode, typer.Option("--preemption-mode", help="What becomes of KV that gives way.")
]
CutThrough = Annotated[bool, typer.Option(help="Prefill rows go on while more come.")]
Compression = Annotated[Literal["none", "lossless"], typer.Option(help="Of rows between stages.")]
MicroBatches = Annotated[str, typer.Option(help="In flight: a number or auto.")]
PrefillOnlyBatches = Annotated[bool, typer.Option(help="Chunks also go without decode rows.")]
MaxNumBatchedTokens = Annotated[str, typer.Option(help="Rows of a prefill volume or auto.")]
Tensors = Annotated[int, typer.Option(min=1, max=2, help="Per row and hop; 2 as vLLM 0.7.")]

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Timeline = Annotated[
    Path | None, typer.Option(help="Draw who computes and sends into this .svg.  [default: none]")
]
Window = Annotated[str | None, typer.Option(help="Seconds A:B that it shows.  [default: all]")]
Replay = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        help="Only compare a recording of a link's decisions with the same once more.  "
        "[default: none]",
    ),
]
