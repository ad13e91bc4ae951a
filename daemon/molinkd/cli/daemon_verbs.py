"""Verbs that run until Ctrl-C: ``up``, ``join``, ``demo``, ``coordinator``."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from molink.errors import UsageError
from molink.facts.dtypes import DTypeChoice
from molink.facts.model import Objective, Quantize
from molink.facts.settings import PreemptionMode
from molinkd.cli.hide_token import hide_token
from molinkd.cli.join_verbs import is_address
from molinkd.cli.swarm_verbs import HomeOption

ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Folder, GGUF file, OWNER/NAME or molink-demo.  [default: the one served last]"
    ),
]
StageOption = Annotated[
    str | None, typer.Option(help="Layers to hold here: auto, none or A:B.  [default: auto]")
]
NameOption = Annotated[
    str | None, typer.Option(help="This PC's name in the swarm.  [default: the PC's own]")
]
HostOption = Annotated[
    str | None,
    typer.Option(help="Address for other PCs to reach this one at.  [default: all interfaces]"),
]
AdvertiseOption = Annotated[
    str | None,
    typer.Option(help="Addresses to tell to others, comma separated.  [default: this PC's]"),
]
ApiHostOption = Annotated[
    str | None, typer.Option(help="Address of the chat endpoint.  [default: 127.0.0.1]")
]
ApiPortOption = Annotated[
    int | None,
    typer.Option(
        "--api-port",
        "--port",
        help="Port of the chat endpoint; taken: an error.  [default: 5465, or the next free one]",
    ),
]
CoordinatorPortOption = Annotated[
    int | None,
    typer.Option(
        help="Of the coordinator while it runs here.  [default: 5466, or the next free one]"
    ),
]
ControlPortOption = Annotated[
    int | None, typer.Option(help="Port for other PCs.  [default: 5467, or the next free one]")
]
WorkerPortsOption = Annotated[
    str | None, typer.Option(help="Ports of the stages here, FIRST-LAST.  [default: 5468-5479]")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="cpu, cuda:N, or several: cuda:0,cuda:1.  [default: all GPUs, or the CPU]"),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Memory that the stage may use: 6GB or 80% (MOLINK_VRAM_BUDGET).  "
        "[default: by the device]"
    ),
]
PauseTimesOption = Annotated[
    str | None,
    typer.Option(
        help="Times of the day without layers here: 18:00-23:30, several with commas.  "
        "[default: none]"
    ),
]
PauseWhenBusyOption = Annotated[
    Literal["off", "on", "auto"] | None,
    typer.Option(
        help="Hold no layers while something else uses the GPU. auto: if it drives a screen.  "
        "[default: auto]"
    ),
]
QuantizeOption = Annotated[
    Quantize | None,
    typer.Option(help="Keep the layers' weights in 8 or 4 bits.  [default: none]"),
]
ThreadsOption = Annotated[
    int | None, typer.Option(help="Compute threads on the CPU.  [default: its cores]")
]
MaxNumBatchedTokensOption = Annotated[
    str | None,
    typer.Option(help="Rows of a prefill chunk: a number, or as measured.  [default: auto]"),
]
SchedulingOption = Annotated[
    str | None,
    typer.Option(
        "--scheduling-policy",
        help="Whose turn it is among requests: fcfs, gittins (short ones go before long ones, by"
        " what similar ones took) or skip-join-mlfq (by what they took so far).  [default: fcfs]",
    ),
]
PreemptionOption = Annotated[
    PreemptionMode | None,
    typer.Option(
        help="What becomes of the KV of a request that gives way to others: computed anew, or kept"
        " in host memory.  [default: recompute]"
    ),
]
SwapSpaceOption = Annotated[
    str | None,
    typer.Option(help="Host memory for that KV, as 4GiB, of each stage.  [default: 4GiB]"),
]
DraftModelOption = Annotated[
    str | None,
    typer.Option(
        help="A small model with the same vocabulary, given as --model is, which guesses tokens "
        "ahead while the first stage is on this PC; off: none.  [default: off]"
    ),
]
BackgroundOption = Annotated[
    bool, typer.Option("--background", help="Return once it runs; `molink down` ends it.")
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        help="Key that the endpoint demands; needed beyond loopback (MOLINK_API_KEY).  "
        "[default: none]"
    ),
]

AllowedHostsOption = Annotated[
    str | None,
    typer.Option(
        "--allowed-hosts",
        "--allowed-host",
        help="Names by which clients may call the endpoint, such as host.docker.internal.  "
        "[default: none]",
    ),
]
CorsOption = Annotated[
    str | None,
    typer.Option(
        "--cors-origins",
        "--cors-origin",
        help="Origins of pages that may use the endpoint: https://chat.example, several with "
        "commas.  [default: none]",
    ),
]


def up(
    model: ModelOption = None,
    stage: StageOption = None,
    name: NameOption = None,
    host: HostOption = None,
    advertise: AdvertiseOption = None,
    api_host: ApiHostOption = None,
    api_port: ApiPortOption = None,
    coordinator_port: CoordinatorPortOption = None,
    control_port: ControlPortOption = None,
    worker_ports: WorkerPortsOption = None,
    device: DeviceOption = None,
    memory: MemoryOption = None,
    threads: ThreadsOption = None,
    max_num_batched_tokens: MaxNumBatchedTokensOption = None,
    scheduling_policy: SchedulingOption = None,
    preemption_mode: PreemptionOption = None,
    swap_space: SwapSpaceOption = None,
    draft_model: DraftModelOption = None,
    pause_times: PauseTimesOption = None,
    pause_when_busy: PauseWhenBusyOption = None,
    dtype: Annotated[DTypeChoice | None, typer.Option(help="Compute in.  [default: auto]")] = None,
    quantize: QuantizeOption = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Most tokens of prompt and answer.  [default: what the model has]"),
    ] = None,
    min_peers: Annotated[
        int | None, typer.Option(help="Peers with a stage to wait for at first.  [default: 1]")
    ] = None,
    objective: Annotated[
        Objective | None,
        typer.Option(
            help="Place stages for one stream's time per token, or for the tokens per second of "
            "many.  [default: latency]"
        ),
    ] = None,
    min_stages: Annotated[
        int | None,
        typer.Option(
            help="Stages to have at least, if there are so many PCs.  [default: min-peers]"
        ),
    ] = None,
    api_key: KeyOption = None,
    allowed_hosts: AllowedHostsOption = None,
    cors_origins: CorsOption = None,
    background: BackgroundOption = False,
    home: HomeOption = None,
) -> None:
    """Start a swarm on this PC, with a chat endpoint.

    Options are kept for the next start; `molink config` shows them, and where each setting is from.
    """
    options = dict(locals())
    _start_daemon("up", home, options, model=options.pop("model"))


def join(
    token: Annotated[
        str | None,
        typer.Argument(
            envvar="MOLINK_TOKEN",
            help="What `molink up` or `molink invite` printed; - reads it from standard input. "
            "None: back to the swarm joined before, or into one of this network. HOST or HOST:PORT "
            "(of `molink up`): into that one.",
        ),
    ] = None,
    swarm: Annotated[
        str | None,
        typer.Option(
            help="Name or id of the swarm, where this network has several.  [default: ask]"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Have the swarm serve this model if it serves none yet.  [default: none]"
        ),
    ] = None,
    stage: StageOption = None,
    name: NameOption = None,
    host: HostOption = None,
    advertise: AdvertiseOption = None,
    api_host: ApiHostOption = None,
    api_port: ApiPortOption = None,
    coordinator_port: CoordinatorPortOption = None,
    control_port: ControlPortOption = None,
    worker_ports: WorkerPortsOption = None,
    device: DeviceOption = None,
    memory: MemoryOption = None,
    threads: ThreadsOption = None,
    max_num_batched_tokens: MaxNumBatchedTokensOption = None,
    scheduling_policy: SchedulingOption = None,
    preemption_mode: PreemptionOption = None,
    swap_space: SwapSpaceOption = None,
    draft_model: DraftModelOption = None,
    pause_times: PauseTimesOption = None,
    pause_when_busy: PauseWhenBusyOption = None,
    api_key: KeyOption = None,
    allowed_hosts: AllowedHostsOption = None,
    cors_origins: CorsOption = None,
    background: BackgroundOption = False,
    home: HomeOption = None,
) -> None:
    """Add this PC to a swarm.

    With a token, or by a code that is approved there. Options are kept for the next start; `molink
    config` shows them, and where each setting is from.
    """
    options = dict(locals())
    token, swarm = options.pop("token"), options.pop("swarm")
    if token == "-":
        token = sys.stdin.readline().strip()
    elif token is not None and not is_address(token):
        hide_token(token)
    _start_daemon("join", home, options, model=options.pop("model"), token=token, swarm=swarm)


def demo(
    ask: Annotated[
        str | None,
        typer.Option(
            help="Print the answer to one question, then end.  [default: run until Ctrl-C]"
        ),
    ] = None,
    peers: Annotated[int, typer.Option(min=1, max=8, help="How many daemons to run.")] = 3,
    dtype: Annotated[DTypeChoice, typer.Option(help="Compute in.")] = "auto",
    quantize: Annotated[
        Quantize, typer.Option(help="Keep the layers' weights in 8 or 4 bits.")
    ] = "none",
    model: Annotated[
        str | None,
        typer.Option(
            help="smollm2 (a small real one, fetched once), or as of `up`.  "
            "[default: the bundled demo model]"
        ),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Run a whole swarm on this PC with a small model, to try it."""
    from molink.checkpoint.model_source import find_local_model
    from molinkd.cli.demo import run_demo
    from molinkd.cli.small_model import fetch_small_model
    from molinkd.peer.artifacts.smollm2 import NAME as SMOLLM2
    from molinkd.peer.home import Home

    if model == SMOLLM2 and find_local_model(model) is None:
        model = fetch_small_model()
    raise typer.Exit(run_demo(Home.find_home(home), peers, dtype, model, ask, quantize))


def coordinator(
    host: HostOption = None,
    port: Annotated[
        int | None, typer.Option(help="Where PCs reach it.  [default: 5466, or the next free one]")
    ] = None,
    advertise: AdvertiseOption = None,
    name: NameOption = None,
    home: HomeOption = None,
) -> None:
    """Run a coordinator alone, without a stage or an endpoint."""
    from molinkd.cli.standalone_coordinator import run_coordinator
    from molinkd.peer.home import Home
    from molinkd.peer.settings import load_settings

    options = {"host": host, "coordinator_port": port, "advertise": advertise, "name": name}
    place = Home.find_home(home)
    run_coordinator(place, load_settings(place, options, os.environ))


def _start_daemon(
    role: Literal["up", "join"],
    home: Path | None,
    options: dict[str, Any],
    *,
    model: str | None = None,
    token: str | None = None,
    swarm: str | None = None,
) -> None:
    from molinkd.imports import permanent_imports

    with permanent_imports():
        from molinkd.cli.daemon_start import start_daemon
    from molinkd.peer.home import Home

    options.pop("home")
    background = options.pop("background")
    if role == "join" and token is not None and not token.strip():
        raise UsageError("the token is empty: paste what `molink up` printed")
    given = {name: value for name, value in options.items() if value is not None}
    place = Home.find_home(home)
    start_daemon(role, place, given, model=model, token=token, swarm=swarm, background=background)
