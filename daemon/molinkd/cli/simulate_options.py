"""The options of ``molink simulate``, by the panels of its help."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

_load = partial(typer.Option, rich_help_panel="Load")
_ring = partial(typer.Option, rich_help_panel="Ring")
_fleet = partial(typer.Option, rich_help_panel="Fleet")
_switch = partial(typer.Option, rich_help_panel="Switches")
_output = partial(typer.Option, rich_help_panel="Output")

Trace = Annotated[Path | None, _load(help="Sizes from an Azure (.csv) or Mooncake (.jsonl) trace.")]
Rate = Annotated[float, _load(help="Requests per second, on average.")]
Duration = Annotated[float, _load(help="Seconds in which requests arrive.")]
Warmup = Annotated[float, _load(help="Seconds before that; requests are not counted.")]
Arrivals = Annotated[
    Literal["poisson", "trace"],
    _load(help="At random, or when the trace says, stretched to --rate."),
]
Longest = Annotated[int, _load(help="Longer ones of the trace are left out.")]
InputTokens = Annotated[int | None, _load(help="Per prompt, without a trace.", show_default="512")]
OutputTokens = Annotated[int | None, _load(help="Per answer, without a trace.", show_default="128")]
Seed = Annotated[int, _load(help="Of the arrivals.")]

Stages = Annotated[int, _ring(help="Of the ring.")]
Device = Annotated[str, _ring(help="Of every stage: a name or a .toml file.")]
ModelProfile = Annotated[str, _ring(help="A name or a .toml file.")]
Link = Annotated[str, _ring(help="Between the stages: a name or a .toml file.")]
Bandwidth = Annotated[float | None, _ring(help="Mbps, instead of the link's.")]
Latency = Annotated[float | None, _ring(help="Milliseconds one way, instead of the link's.")]
Congestion = Annotated[
    Literal["none", "cubic", "bbr"] | None,
    _ring(help="TCP's congestion control, instead of the link's (none, unless it says)."),
]
MaxRunning = Annotated[int, _ring(help="Requests that hold KV blocks at once.")]

Pipelines = Annotated[int | None, _fleet(help="Rings that share the requests.")]
Peers = Annotated[int | None, _fleet(help="PCs in all.", show_default="--pipelines x --stages")]
PeersPerUplink = Annotated[int | None, _fleet(help="PCs behind one router.", show_default="1")]
Router = Annotated[
    str | None,
    _fleet(help="Who gets a request: round-robin, least-loaded.", show_default="least-loaded"),
]
Churn = Annotated[
    float | None, _fleet(help="Times that a PC leaves in an hour, on average.", show_default="0")
]
Away = Annotated[
    float | None, _fleet(help="Seconds that it is away, on average.", show_default="600")
]

Policy = Annotated[str, _switch(help="How links send; several separated by commas.")]
SchedulingPolicy = Annotated[str, _switch(help="Whose turn it is among requests.")]
CutThrough = Annotated[bool, _switch(help="Prefill rows go on while more come.")]
Compression = Annotated[Literal["none", "lossless"], _switch(help="Of rows between stages.")]
MicroBatches = Annotated[str, _switch(help="In flight: a number or auto.")]
Unpaired = Annotated[bool, _switch(help="Chunks also go without decode rows.")]
ChunkTokens = Annotated[str, _switch(help="Rows of a prefill volume or auto.")]
Tensors = Annotated[int, _switch(min=1, max=2, help="Per row and hop; 2 as vLLM 0.7.")]

Json = Annotated[bool, _output("--json", help="Print the result as JSON.")]
Timeline = Annotated[Path | None, _output(help="Draw who computes and sends into this .svg.")]
Window = Annotated[str | None, _output(help="Seconds A:B that it shows.")]
Replay = Annotated[
    Path | None,
    _output(
        "--replay", help="Only compare a recording of a link's decisions with the same once more."
    ),
]
