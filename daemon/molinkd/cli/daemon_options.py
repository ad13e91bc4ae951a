"""The options of ``molink up`` and ``molink join``, each declared once.

Field names are the names of settings; ``None`` means that an option was not given.
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, Literal, get_type_hints

import typer

from molink.facts.dtypes import DTypeChoice
from molink.facts.model import KVCacheDType, Objective, Quantize
from molink.facts.settings import PreemptionMode

#: Options that are not settings, so that they are not saved.
_NOT_SETTINGS = frozenset({"background", "model", "token", "swarm"})


def _option(panel: str, text: str, *names: str, min: int | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, min=min)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """The options that ``up`` and ``join`` share."""

    stage: Annotated[
        str | None,
        _option("Common", "Layers to hold on this PC: auto, none or A-B.  [default: auto]"),
    ] = None
    name: Annotated[
        str | None, _option("Common", "Name of this PC in the swarm.  [default: host name]")
    ] = None
    api_host: Annotated[
        str | None, _option("Network", "Endpoint address.  [default: 127.0.0.1]")
    ] = None
    api_port: Annotated[
        int | None,
        _option(
            "Network",
            "Endpoint port; fails if in use.  [default: 5465 or the next free port]",
            "--api-port",
            "--port",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        _option(
            "Network",
            "API key of the endpoint, required beyond loopback (MOLINK_API_KEY).  [default: none]",
        ),
    ] = None
    allowed_hosts: Annotated[
        str | None,
        _option(
            "Network",
            "Additional host names of the endpoint, such as host.docker.internal.  [default: none]",
            "--allowed-hosts",
            "--allowed-host",
        ),
    ] = None
    cors_origins: Annotated[
        str | None,
        _option(
            "Network",
            "Web pages that may use the endpoint, comma separated: https://chat.example.  "
            "[default: none]",
            "--cors-origins",
            "--cors-origin",
        ),
    ] = None
    host: Annotated[
        str | None, _option("Network", "Address to bind for other PCs.  [default: all interfaces]")
    ] = None
    advertise: Annotated[
        str | None,
        _option(
            "Network", "Addresses announced to other PCs, comma separated.  [default: this PC's]"
        ),
    ] = None
    rendezvous: Annotated[
        str | None,
        _option(
            "Network",
            "Where PCs behind routers meet, SECRET@HOST:PORT of `molink rendezvous`.  "
            "[default: the token's]",
        ),
    ] = None
    coordinator_port: Annotated[
        int | None,
        _option(
            "Network",
            "Coordinator port, when it runs on this PC.  [default: 5466 or the next free port]",
        ),
    ] = None
    control_port: Annotated[
        int | None,
        _option("Network", "Port for other PCs.  [default: 5467 or the next free port]"),
    ] = None
    worker_ports: Annotated[
        str | None, _option("Network", "Worker ports, FIRST-LAST.  [default: 5468-5479]")
    ] = None
    device: Annotated[
        str | None,
        _option(
            "Device", "cpu, cuda:N, or several: cuda:0,cuda:1.  [default: all GPUs, else the CPU]"
        ),
    ] = None
    memory: Annotated[
        str | None,
        _option(
            "Device",
            "Memory that molink may use: 6GB or 80% (MOLINK_VRAM_BUDGET).  "
            "[default: by the device]",
        ),
    ] = None
    expert_memory: Annotated[
        str | None,
        _option(
            "Device",
            "RAM for experts of a mixture that don't fit the GPU, computed by the CPU: 48GB, 60% "
            "or auto.  [default: none]",
        ),
    ] = None
    threads: Annotated[
        int | None, _option("Device", "CPU compute threads.  [default: number of cores]")
    ] = None
    pause_times: Annotated[
        str | None,
        _option(
            "Device",
            "Daily times without layers, comma separated: 18:00-23:30.  [default: none]",
        ),
    ] = None
    pause_when_busy: Annotated[
        Literal["off", "on", "auto"] | None,
        _option(
            "Device",
            "Hold no layers while other programs use the GPU; auto: if it drives a display.  "
            "[default: auto]",
        ),
    ] = None
    scheduling_policy: Annotated[
        str | None,
        _option(
            "Scheduling",
            "Request order: fcfs, gittins (shortest expected first) or skip-join-mlfq (least "
            "served first).  [default: fcfs]",
        ),
    ] = None
    preemption_mode: Annotated[
        PreemptionMode | None,
        _option(
            "Scheduling",
            "KV of preempted requests: recompute it, or swap it to host memory.  "
            "[default: recompute]",
        ),
    ] = None
    swap_space: Annotated[
        str | None,
        _option("Scheduling", "Host memory per stage for swapped KV.  [default: 4GiB]"),
    ] = None
    max_num_batched_tokens: Annotated[
        str | None,
        _option("Advanced", "Prefill chunk size in tokens: a number or auto.  [default: auto]"),
    ] = None
    draft_model: Annotated[
        str | None,
        _option(
            "Advanced",
            "Small model with the same vocabulary for speculative decoding, used while this PC "
            "has the first stage; off: none.  [default: off]",
        ),
    ] = None
    background: Annotated[
        bool, _option("Common", "Return once it runs; `molink down` stops it.", "--background")
    ] = False

    def given_settings(self) -> dict[str, Any]:
        """Return the given settings."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {
            name: value
            for name, value in values.items()
            if value not in (None, []) and name not in _NOT_SETTINGS
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions(DaemonOptions):
    """The options of ``up``."""

    model: Annotated[
        str | None,
        _option(
            "Common",
            "Short name (molink search), OWNER/NAME, folder or GGUF file.  "
            "[default: last one served]",
        ),
    ] = None
    adapters: Annotated[
        list[str] | None,
        _option(
            "Model",
            "LoRA adapter in a PEFT folder, NAME=FOLDER, which requests choose as the model NAME; "
            "may be given several times.  [default: none]",
            "--adapter",
            "--adapters",
        ),
    ] = None
    quantize: Annotated[
        Quantize | None, _option("Model", "Weight quantization.  [default: none]")
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType | None, _option("Model", "Keys and values of requests.  [default: auto]")
    ] = None
    dtype: Annotated[
        DTypeChoice | None, _option("Model", "Data type for computation.  [default: auto]")
    ] = None
    max_model_len: Annotated[
        int | None,
        _option(
            "Model",
            "Context length: prompt plus answer, in tokens.  [default: the model's]",
            min=1,
        ),
    ] = None
    min_peers: Annotated[
        int | None,
        _option("Advanced", "PCs with layers to wait for at first.  [default: 1]"),
    ] = None
    min_stages: Annotated[
        int | None,
        _option("Advanced", "Minimum stages, if there are enough PCs.  [default: min-peers]"),
    ] = None
    objective: Annotated[
        Objective | None,
        _option(
            "Advanced",
            "Optimize placement for the latency of one stream or the throughput of many.  "
            "[default: latency]",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions(DaemonOptions):
    """The options of ``join``."""

    token: Annotated[
        str | None,
        typer.Argument(
            envvar="MOLINK_TOKEN",
            help="Token from `molink invite` (- reads standard input), or HOST[:PORT] of the PC "
            "that leads the swarm. Without it, rejoins the last swarm or finds one on this "
            "network.",
        ),
    ] = None
    swarm: Annotated[
        str | None,
        _option("Common", "Name or id of the swarm, if this network has several.  [default: ask]"),
    ] = None
    model: Annotated[
        str | None,
        _option("Common", "Model to serve if the swarm serves none yet.  [default: none]"),
    ] = None


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` the fields of its parameter ``options`` as options of its own."""
    signature = inspect.signature(command, eval_str=True)
    kind = signature.parameters["options"].annotation
    hints = get_type_hints(kind, include_extras=True)
    shared = {each.name for each in dataclasses.fields(DaemonOptions)}
    # The help lists the command's own options first.
    fields = sorted(dataclasses.fields(kind), key=lambda each: each.name in shared)
    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=hints[each.name],
        )
        for each in fields
    ]
    parameters += [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, each in signature.parameters.items()
        if name != "options"
    ]

    @wraps(command)
    def expanded(**values: Any) -> None:
        options = kind(**{each.name: values.pop(each.name) for each in fields})
        command(options=options, **values)

    vars(expanded)["__signature__"] = signature.replace(parameters=parameters)
    expanded.__annotations__ = {each.name: each.annotation for each in parameters}
    return expanded
