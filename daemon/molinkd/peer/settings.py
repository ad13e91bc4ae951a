"""Settings of a daemon from defaults, files, the last start, ``MOLINK_*`` and the command line.

Everything is parsed here: sizes are bytes and times are seconds everywhere else.
"""

import platform
import re
import tomllib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import platformdirs

from molink.errors import UsageError
from molink.facts.drafts import AUTO_DRAFTS
from molink.facts.dtypes import DTypeChoice
from molink.facts.layer_range import parse_layers
from molink.facts.model import AdapterFolders, KVCacheDType, Objective, Quantize
from molink.facts.settings import PipelineSettings
from molink.swarm.agent.pause_policy import DailyWindow
from molink.swarm.membership.discovery import PAIRING_PORT
from molink.swarm.membership.sanitize import sanitize_name
from molink.text.tool_calls.formats import ToolCallParserChoice
from molink.wire.messages.rendezvous import RendezvousAddress
from molink.wire.sockets.secrets import write_secret
from molinkd.peer.home import Home
from molinkd.peer.membership.addresses import is_reachable_name

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
KeyName = Annotated[str, msgspec.Meta(pattern=r"^[\w.-]{1,32}$")]

_PERCENT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*%\s*$")
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*$", re.IGNORECASE)
_COMPLAINT = re.compile(r"(?P<what>.*) - at `\$\.(?P<field>\w+)[^`]*`$", re.DOTALL)
_BOUND = re.compile(r"Expected `\w+` (?P<side>[<>]=?) (?P<limit>\S+)$")
_QUOTED_NAME = re.compile(r"[`']([a-z_]+)[`']")
#: Smallest number of bytes that may be given without a unit; a smaller one means gigabytes.
_LEAST_BARE_SIZE = 1 << 20
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
#: Keywords that some numeric settings accept.
_KEYWORDS = {
    "max_num_batched_tokens": {"auto": 0},
    "micro_batches": {"auto": 0},
    "num_speculative_tokens": {"off": 0, "auto": AUTO_DRAFTS},
}
_DEVICE = re.compile(r"^(?:auto|(?:cpu|cuda(?::\d{1,3})?)(?:,(?:cpu|cuda(?::\d{1,3})?)){0,15})$")


#: Use free host memory for experts.
AUTO_EXPERT_MEMORY = -1


class MemoryShare(msgspec.Struct, frozen=True):
    """A percentage of a device's memory."""

    percent: Annotated[float, msgspec.Meta(gt=0, le=100)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one daemon. Sizes in bytes, times in seconds; port 0 means any free port."""

    #: This PC's name in the swarm; the host name by default.
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = ""
    #: Bind address of the control, coordinator and stage sockets (all authenticated).
    host: str = "0.0.0.0"
    #: Addresses advertised to other PCs; empty means all interfaces. Only a standalone coordinator
    #: may include ports.
    advertise: tuple[str, ...] = ()
    api_host: str = "127.0.0.1"
    api_port: Port = 5465
    coordinator_port: Port = 5466
    control_port: Port = 5467
    #: First and last port for stages, inclusive.
    worker_ports: tuple[Port, Port] = (5468, 5479)
    #: Single ports that were set explicitly; no other port is tried for these.
    chosen_ports: tuple[str, ...] = ()
    #: Whether the leader announces the swarm on the local network and accepts pairing requests, and
    #: ``molink join`` without a token scans for swarms.
    discovery: bool = True
    #: Whether to ask the router to forward this PC's ports (PCP, NAT-PMP, UPnP).
    port_mapping: bool = False
    #: Where peers behind routers meet, ``SECRET@HOST:PORT``; empty means that of the token.
    rendezvous: Annotated[str, msgspec.Meta(max_length=256)] = ""
    #: Pairing port, or the next free one below it.
    pairing_port: Port = PAIRING_PORT
    #: API key; required unless the API is bound to loopback.
    api_key: str | None = None
    #: Further API keys by client name.
    api_keys: Annotated[dict[KeyName, str], msgspec.Meta(max_length=64)] = {}
    #: Further host names that clients may use for the API (``Host`` header).
    allowed_hosts: tuple[str, ...] = ()
    #: CORS origins: origins, ``scheme://*`` or ``*``.
    cors_origins: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    #: Whether clients with different API keys share cached prompts; each can then tell from usage
    #: and times whether a prompt was asked before.
    share_prefix_cache: bool = False
    #: ``auto``, ``none`` or ``A-B`` (layers, from 1).
    stage: str = "auto"
    #: ``cpu``, ``cuda:N``, a comma-separated list, or ``auto`` (all GPUs, otherwise the CPU).
    device: str = "auto"
    #: Bytes that stages may use per device, or a share of it; 0 means automatic.
    memory: Annotated[int, msgspec.Meta(ge=0)] | MemoryShare = 0
    #: Bytes of host memory per device for experts that don't fit on it, or a share of it; -1 means
    #: as much as is free.
    expert_memory: Annotated[int, msgspec.Meta(ge=AUTO_EXPERT_MEMORY)] | MemoryShare = 0
    #: Compute threads per stage on the CPU; 0 means cores divided by ``stages_per_host``.
    threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    #: Stages of all daemons on this PC, which share its memory and cores.
    stages_per_host: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    #: Whether to keep standby workers, which replace lost ones without importing torch first.
    standby_worker: bool = True
    #: Whether to replicate the other stages' layers to this PC's disk in the background.
    replicate_models: bool = True
    #: Whether to fetch tensors from the Hugging Face hub rather than from distant PCs.
    hub_files: bool = True
    #: Daily times, ``18:00-23:30``, at which this PC holds no layers.
    pause_times: Annotated[tuple[str, ...], msgspec.Meta(max_length=16)] = ()
    #: Whether to pause while another program uses the GPU. ``auto``: if the GPU drives a display
    #: and no other daemon on this PC has a stage.
    pause_when_busy: Literal["off", "on", "auto"] = "auto"
    #: Whether this PC relays traffic of PCs that can't connect to each other.
    relay: bool = True
    #: Whether to inhibit sleep while this PC holds layers.
    keep_awake: bool = True
    dtype: DTypeChoice = "auto"
    #: Weight quantization of layers; a model that is quantized already stays as it is.
    quantize: Quantize = "none"
    #: How stages keep keys and values.
    kv_cache_dtype: KVCacheDType = "auto"
    #: PEFT folders of the model's LoRA adapters, by the names that requests use.
    adapters: AdapterFolders = {}
    #: Small model with the same vocabulary for speculative decoding, if the scheduler runs on this
    #: PC; empty means none.
    draft_model: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    #: Context length: prompt plus answer, in tokens; 0 means the model's own.
    max_model_len: Annotated[int, msgspec.Meta(ge=0, le=2**24)] = 0
    min_peers: Annotated[int, msgspec.Meta(ge=1, le=255)] = 1
    #: Placement objective: time per token of one stream, or total tokens/s.
    objective: Objective = "latency"
    #: Minimum number of stages, if there are enough peers; 0 means ``min_peers``.
    min_stages: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    #: Micro-batches in flight; 0 means automatic.
    micro_batches: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    #: Settings passed to workers unchanged. Users set its fields like any other setting.
    pipeline: PipelineSettings = PipelineSettings()
    #: How long a request waits for a ready pipeline, in seconds.
    pipeline_wait_timeout: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 30.0
    #: How long running answers may continue at shutdown, in seconds.
    shutdown_grace_period: Annotated[float, msgspec.Meta(ge=0, le=20)] = 10.0
    #: Maximum number of PCs in the swarm.
    max_peers: Annotated[int, msgspec.Meta(ge=1, le=255)] = 64
    #: Router among several pipelines of a model.
    router: Literal["e2", "least-loaded", "round-robin"] = "e2"
    #: Format of tool calls in answers; ``raw`` passes them through.
    tool_call_parser: ToolCallParserChoice = "auto"
    #: Maximum size of a request body, in bytes.
    max_body: Annotated[int, msgspec.Meta(ge=1024)] = 2 << 20
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        if self.name != sanitize_name(self.name, ""):
            raise ValueError(
                f"`name` has letters, digits, single spaces and - _ . ' only, not {self.name!r}"
            )
        names_layers = self.stage not in ("auto", "none")
        if names_layers and parse_layers(self.stage) is None:
            raise ValueError(f"`stage` is auto, none or A-B, such as 1-12, not {self.stage!r}")
        if _DEVICE.match(self.device) is None:
            raise ValueError(
                f"`device` is auto, cpu, cuda:N or several of these with commas, not "
                f"{self.device!r}"
            )
        if names_layers and len(self.devices) > 1:
            raise ValueError("`stage` A-B is for a PC with one `device`; others take auto")
        for text in self.pause_times:
            DailyWindow.parse(text)
        _check_addresses(self)
        for name, choices in _policy_choices(self.pipeline).items():
            chosen = getattr(self.pipeline, name)
            if chosen not in choices:
                raise ValueError(f"`{name}` is one of {', '.join(choices)}, not {chosen!r}")
        if self.worker_ports[0] > self.worker_ports[1]:
            raise ValueError("`worker_ports` takes a first and a last port")

    def ports_to_try(self, name: str) -> tuple[int, int]:
        """Half-open range of ports to try for the setting ``name``; 0 lets the system choose."""
        first: int = getattr(self, name)
        tried = 1 if name in self.chosen_ports or not first else MAX_PORTS_TRIED
        return first, min(65536, first + tried)

    @property
    def member_ports(self) -> tuple[int, ...]:
        """Worker ports that only members dial: all but the pairing port, which asks for no key."""
        first, last = self.worker_ports
        kept = self.pairing_port if self.discovery else 0
        return tuple(port for port in range(first, last + 1) if first and port != kept)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices named by ``device``."""
        return tuple(self.device.split(","))


#: All settings that users can set.
SETTING_NAMES = (
    *(name for name in Settings.__struct_fields__ if name not in ("pipeline", "chosen_ports")),
    *PipelineSettings.__struct_fields__,
)

#: Settings whose values are never shown.
SECRET_SETTINGS = ("api_key", "api_keys", "rendezvous")

#: How many ports are tried, unless the port was set explicitly.
MAX_PORTS_TRIED = 16
_SINGLE_PORTS = ("api_port", "coordinator_port", "control_port")

#: Settings from one source, before merging.
SettingsLayer = Mapping[str, Any]


def _check_addresses(settings: Settings) -> None:
    for text in settings.advertise:
        host, _, port = text.rpartition(":")
        named = is_reachable_name(host.strip("[]")) and port.isdecimal()
        if not is_reachable_name(text) and not (named and 0 < int(port) < 65536):
            raise ValueError(
                f"`advertise` takes addresses or host names, like 192.168.1.7, not {text!r}"
            )
    if settings.rendezvous:
        try:
            RendezvousAddress.parse(settings.rendezvous)
        except ValueError as error:
            raise ValueError(f"`rendezvous`: {error}") from None


def _policy_choices(pipeline: PipelineSettings) -> dict[str, tuple[str, ...]]:
    """Names of policies by setting; empty for the defaults, since policies import a scheduler."""
    default = PipelineSettings()
    if (pipeline.link_policy, pipeline.scheduling_policy) == (
        default.link_policy,
        default.scheduling_policy,
    ):
        return {}
    from molink.link.policies.create import POLICIES
    from molink.scheduler.policies.create import SCHEDULING_POLICIES

    return {"link_policy": POLICIES, "scheduling_policy": SCHEDULING_POLICIES}


def load_settings(
    home: Home,
    options: SettingsLayer,
    environment: Mapping[str, str],
    remembered: SettingsLayer = types.MappingProxyType({}),
) -> Settings:
    """Merge all sources; ``options`` of the command line are ``None`` where not given.

    ``remembered`` are the options of the last start.

    Raises:
        UsageError: A value is invalid; the message names its source, and how to unset it.
    """
    settings = apply_layer({}, default_settings(), "the defaults")
    given = {name: value for name, value in options.items() if value is not None}
    above = {*given, *read_environment(environment)}
    kept = {name: value for name, value in remembered.items() if name not in above}
    try:
        for where, layer in (
            *settings_layers(home, environment, kept),
            ("the command line", given),
        ):
            settings = apply_layer(layer, settings, where)
    except UsageError as error:
        blamed = next((one for one in _QUOTED_NAME.findall(str(error)) if one in kept), None)
        if blamed is None:
            raise
        forget = home.format_command(f"config unset {blamed}")
        text = f"`{blamed}` was saved at the last start; {forget} removes it"
        raise UsageError(f"{error} ({text})") from None
    return settings


def default_settings() -> Settings:
    """Settings without any source."""
    return Settings(name=_pc_name())


def settings_layers(
    home: Home, environment: Mapping[str, str], remembered: SettingsLayer
) -> tuple[tuple[str, SettingsLayer], ...]:
    """All sources except the command line, with their names; later ones override.

    Raises:
        UsageError: A file can't be read.
    """
    common = platformdirs.user_config_path("molink", False) / "config.toml"
    return (
        *((str(path), read_toml(path)) for path in (common, home.config)),
        ("the options of the last start", remembered),
        ("the environment (MOLINK_*)", read_environment(environment)),
    )


def apply_layer(layer: SettingsLayer, below: Settings, where: str) -> Settings:
    """``below`` overridden by ``layer``, whose values are parsed if they are text."""
    values: dict[str, Any] = msgspec.structs.asdict(below)
    inner: dict[str, Any] = msgspec.structs.asdict(values.pop("pipeline"))
    for name, value in layer.items():
        if name not in SETTING_NAMES:
            known = ", ".join(sorted(SETTING_NAMES))
            raise UsageError(f"{where}: unknown setting {name!r}; known settings: {known}")
        parsed = (
            _parse_adapters(value, where)
            if name == "adapters"
            else _parse_value(name, value, where)
        )
        (inner if name in inner else values)[name] = parsed
    chosen = {*below.chosen_ports, *(name for name in _SINGLE_PORTS if name in layer)}
    values["chosen_ports"] = tuple(sorted(chosen))
    try:
        pipeline = msgspec.convert(inner, PipelineSettings, strict=False)
        return msgspec.convert(values | {"pipeline": pipeline}, Settings, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"{where}: {_explain_error(str(error), values | inner)}") from None


def _explain_error(error: str, values: SettingsLayer) -> str:
    """msgspec's error with the setting's name, since not every setting is an option."""
    match = _COMPLAINT.match(error)
    if match is None:
        return error
    name = match["field"]
    value = "…" if name.startswith("api_key") else values.get(name)
    if "enum" in match["what"]:
        kinds = {**PipelineSettings.__annotations__, **Settings.__annotations__}
        return f"`{name}` is one of {', '.join(get_args(kinds[name]))}, not {value!r}"
    bound = _BOUND.match(match["what"])
    if bound is None:
        return f"`{name}` can't be {value!r}: {match['what']}"
    side = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}[bound["side"]]
    return f"`{name}` is {side} {bound['limit']}, not {value}"


def read_toml(path: Path) -> SettingsLayer:
    """Settings of a TOML file; empty if it does not exist."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"can't read the settings in {path}: {error}") from None


def read_environment(environment: Mapping[str, str]) -> SettingsLayer:
    """Settings of the environment: ``MOLINK_NAME`` sets ``name`` and so on.

    ``MOLINK_VRAM_BUDGET`` sets ``memory``.
    """
    names = {f"MOLINK_{name.upper()}": name for name in SETTING_NAMES}
    names["MOLINK_VRAM_BUDGET"] = "memory"
    return {names[key]: text for key, text in environment.items() if key in names}


def parse_size(text: str) -> int:
    """Bytes of ``8GB``, ``512 MiB`` or ``1073741824``; only large numbers need no unit.

    Raises:
        UsageError: ``text`` is not a size.
    """
    match = _SIZE.match(text)
    if match is None:
        raise UsageError(f"not a size: {text!r}. Write for example 8GB, 512MB or 6GiB.")
    number, unit, suffix = match.groups()
    if not unit and not suffix and 0 < float(number) < _LEAST_BARE_SIZE:
        raise UsageError(f"{number} bytes? Write {number}GiB or {number}MiB")
    factor = _UNITS[unit.lower()]
    if suffix and suffix.lower() == "ib":
        factor = 1 << (10 * list(_UNITS).index(unit.lower()))
    return int(float(number) * factor)


def parse_memory(text: str) -> int | MemoryShare:
    """Bytes as in :func:`parse_size`, or the share of ``80%``.

    Raises:
        UsageError: ``text`` is neither.
    """
    match = _PERCENT.match(text)
    if match is None:
        if "%" in text:
            raise UsageError(f"not a share: {text!r}. Write for example 80%, or a size: 8GB.")
        return parse_size(text)
    percent = float(match[1])
    if not 0 < percent <= 100:
        raise UsageError(f"a share of memory is above 0% and at most 100%, not {text.strip()}")
    return MemoryShare(percent)


def parse_expert_memory(text: str) -> int | MemoryShare:
    """As :func:`parse_memory`, or ``auto``.

    Raises:
        UsageError: ``text`` is neither.
    """
    return AUTO_EXPERT_MEMORY if text.strip().lower() == "auto" else parse_memory(text)


#: Parsers of settings that are amounts of memory.
_AMOUNT_PARSERS: Mapping[str, Callable[[str], int | MemoryShare]] = {
    "memory": parse_memory,
    "expert_memory": parse_expert_memory,
    "max_body": parse_size,
    "swap_space": parse_size,
}


def _parse_value(name: str, value: object, where: str) -> object:
    """A value in the form that the field expects."""
    if name in _AMOUNT_PARSERS and (isinstance(value, str) or (type(value) is int and value > 0)):
        try:
            return _AMOUNT_PARSERS[name](str(value))
        except UsageError as error:
            raise UsageError(f"{where}: {name}: {error}") from None
    if not isinstance(value, str):
        return value
    if name == "device":
        return ",".join(part.strip() for part in value.split(","))
    if name in ("advertise", "allowed_hosts", "api_keys", "cors_origins", "pause_times"):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        return _parse_api_keys(parts, where) if name == "api_keys" else parts
    if name in _KEYWORDS:
        return _parse_number(name, value, where)
    if name == "draft_model":
        if value.strip().lower() == "off":
            return ""
        from molink.checkpoint.model_source import find_local_model

        found = find_local_model(value)
        return value if found is None else str(found)
    if name == "record" and value:
        return str(Path(value).absolute())  # workers have another working directory
    if name == "worker_ports":
        first, dash, last = value.partition("-")
        if not dash:
            raise UsageError(f"{where}: worker_ports is FIRST-LAST, not {value!r}")
        return [first.strip(), last.strip()]
    return value


def _parse_number(name: str, value: str, where: str) -> object:
    words, word = _KEYWORDS[name], value.strip().lower()
    if word not in words and not word.isdecimal():
        raise UsageError(f"{where}: `{name}` is a number or {' or '.join(words)}, not {value!r}")
    return words.get(word, word)


def _parse_api_keys(parts: list[str], where: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in parts]
    if not all(equals for _, equals, _ in pairs):
        raise UsageError(f"{where}: `api_keys` is NAME=KEY, several with commas")
    return {name.strip(): key.strip() for name, _, key in pairs}


def _parse_adapters(value: object, where: str) -> dict[str, str]:
    """Absolute folders of adapters from ``NAME=FOLDER,…``, a list of such pairs, or a table."""
    pairs: list[tuple[object, object]] = []
    if isinstance(value, dict):
        pairs = [*value.items()]
    else:
        listed = value.split(",") if isinstance(value, str) else value
        for text in listed if isinstance(listed, list | tuple) else [listed]:
            before, _, after = str(text).partition("=")
            pairs += [(before.strip(), after.strip())] if str(text).strip() else []
    found: dict[str, str] = {}
    for name, folder in pairs:
        if not (isinstance(name, str) and name and isinstance(folder, str) and folder):
            raise UsageError(f"{where}: `adapters` is NAME=FOLDER, several with commas")
        if name in found:
            raise UsageError(f"{where}: two `adapters` are called {name}")
        # Workers have another working directory.
        found[name] = str(Path(folder).expanduser().absolute())
    return found


def _pc_name() -> str:
    return sanitize_name(platform.node().split(".")[0], "peer")


_Option = str | int | float | bool


def read_options(path: Path) -> dict[str, Any]:
    """The saved options by setting; empty if there are none.

    Raises:
        UsageError: The file can't be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _Option | list[_Option]])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{path} can't be read: {error}. Delete it and pass your options again."
        ) from None


def write_options(path: Path, options: Mapping[str, Any]) -> None:
    """Save options. They may contain an API key, so only the owner may read the file."""
    write_secret(path, msgspec.json.encode(options).decode("utf-8"))


def format_options(options: Mapping[str, Any]) -> str:
    """Options as typed, with secrets hidden: ``--stage none --threads 2``."""
    return " ".join(
        f"--{name.replace('_', '-')} {'…' if name in SECRET_SETTINGS else one}"
        for name, value in options.items()
        for one in (value if isinstance(value, list) else [value])
    )
