"""Profiles of devices, models and links: TOML files in ``configs/``."""

import math
import re
import tomllib
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from molink.errors import UsageError
from molink.facts.dtypes import KV_SCALE_BYTES
from molink.facts.kernels import MIN_TRITON_CAPABILITY
from molink.facts.model import KVCacheDType
from molink.sim.congestion.base import CONGESTION_CONTROLS

#: One Mbit/s in bytes/s.
MBPS = 1e6 / 8
#: Default maximum length of prompt plus answer, in tokens.
MAX_MODEL_LEN = 32_768


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device's roofline from its data sheet.

    ``memory_gbs`` (GB/s) and ``tflops`` (dense, 16 bit with 32-bit accumulation) are nominal;
    ``memory_efficiency`` and ``compute_efficiency`` are the shares that decoding and prefilling
    reach. ``step_ms`` is the fixed cost of a forward pass, ``tile`` the row granularity of matrix
    products, ``memory_gb`` the device's memory. With ``blocks``, the device multiplies by GGUF
    blocks directly, as CPUs do. ``capability`` is an NVIDIA card's compute capability, 0 for
    others. ``pcie_gbs`` (GB/s) is the rate of copies to and from pinned host memory, 0 if unknown.
    """

    name: str
    source: str
    memory_gbs: float
    tflops: float
    memory_gb: float
    memory_efficiency: float
    compute_efficiency: float
    step_ms: float
    tile: int = 1
    blocks: bool = False
    capability: float = 0.0
    pcie_gbs: float = 0.0

    @property
    def has_triton(self) -> bool:
        """Whether molink's Triton kernels are compiled for this card."""
        return divmod(round(10 * self.capability), 10) >= MIN_TRITON_CAPABILITY

    @property
    def keeps_blocks(self) -> bool:
        """Whether low-bit weights stay low-bit; a card must also pass molink's check."""
        return self.blocks or self.has_triton

    @property
    def interleaves(self) -> bool:
        """Whether decode rows run between the layers of a chunk, as on CPUs."""
        return self.blocks


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A decoder's shape; ``bytes_per_parameter`` is 2 for 16-bit weights.

    A device that multiplies by GGUF blocks reads ``block_bytes`` per layer parameter and
    ``head_block_bytes`` per parameter of the output head; 0 if there are no blocks.

    For a mixture of experts, ``intermediate`` is the width that a row computes with.
    ``expert_share`` is the experts' share of a layer's bytes, and a row reads ``chosen_share`` of
    the experts. Since the bytes per parameter count all experts, the output head has its own
    ``head_bytes`` (0: as in layers).

    If some layers are recurrent, ``attention_share`` of the layers have attention. ``state_bytes``
    is a request's recurrent state per layer, averaged over all layers, and ``slot_bytes`` that with
    what is kept for drafts. The last stage has ``mtp_layers`` additional layers for MTP.
    """

    name: str
    source: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    bytes_per_parameter: float = 2.0
    block_bytes: float = 0.0
    head_block_bytes: float = 0.0
    head_bytes: float = 0.0
    expert_share: float = 0.0
    chosen_share: float = 1.0
    attention_share: float = 1.0
    state_bytes: float = 0.0
    slot_bytes: float = 0.0
    kv_cache_dtype: KVCacheDType = "auto"
    kv_kinds: int = 2
    mtp_layers: int = 0

    def read_share(self, rows: int) -> float:
        """Return the share of a layer's bytes that ``rows`` rows read with independent experts."""
        return 1.0 - self.expert_share * (1.0 - self.chosen_share) ** rows

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices; in a mixture, those that a row computes with."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in an attention layer.

        They have 16 bits each, or 8 bits with scales.
        """
        if self.kv_cache_dtype == "int8":
            return self.kv_kinds * self.kv_heads * (self.head_size + KV_SCALE_BYTES)
        return self.kv_kinds * self.kv_heads * self.head_size * 2


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A link: bandwidth in Mbps, one-way latency in ms, and the payload's share of the bandwidth.

    ``efficiency`` is the share that TCP, IP and CURVE leave: 1448 of 1500 bytes on the wire
    (0.965), less acknowledgements and ZeroMQ frames. ``queue_kb`` (kB) is the amount that sockets
    and router buffer for each channel in front of the bottleneck; decodes wait behind a full bulk
    channel. With a ``congestion`` control, it is the size of the router's queue and of each
    socket's buffer. ``handling_ms`` is the receiving PC's time per message (event loop, decryption,
    thread switches).
    """

    bandwidth_mbps: float = 100.0
    latency_ms: float = 30.0
    efficiency: float = 0.95
    queue_kb: float = 256.0
    congestion: str = "none"
    handling_ms: float = 0.0
    name: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        _check(self, "the link")
        if self.congestion not in CONGESTION_CONTROLS:
            choices = ", ".join(CONGESTION_CONTROLS)
            raise UsageError(
                f"the link: congestion must be one of {choices}, not {self.congestion}"
            )

    @property
    def rate(self) -> float:
        """Bytes/s of messages."""
        return self.bandwidth_mbps * MBPS * self.efficiency

    @property
    def latency(self) -> float:
        """Seconds one way."""
        return self.latency_ms / 1000

    @property
    def handling(self) -> float:
        """Seconds from a message's arrival until the stage receives it."""
        return self.handling_ms / 1000

    @property
    def queue(self) -> int:
        """Bytes of queue in front of the bottleneck."""
        return int(self.queue_kb * 1000)


ProfileKind = Literal["devices", "models", "links"]
_Profile = TypeVar("_Profile", DeviceProfile, ModelProfile, LinkProfile)

_MAY_BE_ZERO = {
    "latency_ms",
    "handling_ms",
    "step_ms",
    "pcie_gbs",
    "capability",
    "block_bytes",
    "head_block_bytes",
    "head_bytes",
    "expert_share",
    "slot_bytes",
    "state_bytes",
    "mtp_layers",
}
#: Keys whose value is a share between 0 and 1.
_SHARES = {
    "memory_efficiency",
    "compute_efficiency",
    "efficiency",
    "expert_share",
    "chosen_share",
    "attention_share",
}
_MAX_VALUE = 1e9


def load_device(name: str) -> DeviceProfile:
    """Load a device by ``.toml`` file, or by profile name: "RTX 4090" means ``rtx4090``.

    Raises:
        UsageError: there is no such profile (names the known ones), or it is invalid.
    """
    return _load(DeviceProfile, "devices", name)


def load_model(name: str) -> ModelProfile:
    """Load a model by profile name or ``.toml`` file; raises as :func:`load_device`."""
    return _load(ModelProfile, "models", name)


def load_link(name: str) -> LinkProfile:
    """Load a link by profile name or ``.toml`` file; raises as :func:`load_device`."""
    return _load(LinkProfile, "links", name)


def list_profiles(kind: ProfileKind) -> list[str]:
    """Names of the bundled profiles."""
    folder = resources.files("molink.configs") / kind
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def _load(shape: type[_Profile], kind: ProfileKind, name: str) -> _Profile:
    where = name
    if name.endswith(".toml"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            why = error.strerror or error
            raise UsageError(f"can't read the profile {name}: {why}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"can't read the profile {name}: it is not UTF-8 text") from error
        name = Path(name).stem
    else:
        name = _find_name(kind, name)
        file = resources.files("molink.configs") / kind / f"{name}.toml"
        where, text = f"{name}.toml", file.read_text(encoding="utf-8")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where}: {error}") from error
    return _parse(shape, name, values, where)


def _find_name(kind: ProfileKind, name: str) -> str:
    """Find the bundled profile that ``name`` means, for example "NVIDIA GeForce RTX 4090".

    Raises:
        UsageError: there is none.
    """
    known = list_profiles(kind)
    by_plain = {_plain_name(one): one for one in known}
    plain = _plain_name(name)
    found = by_plain.get(plain) or by_plain.get(f"rtx{plain}")
    if found is None:
        raise UsageError(
            f"there is no profile {name!r} among the {kind}: {', '.join(known)}. A .toml file of "
            "your own works too"
        )
    return found


def _plain_name(name: str) -> str:
    """Return a name in lower case without brand, spaces and hyphens."""
    return re.sub(r"nvidia|geforce|gpu|[^a-z0-9.+]", "", name.lower())


def _parse(shape: type[_Profile], name: str, values: dict[str, Any], where: str) -> _Profile:
    known_keys = {each.name: each for each in fields(shape)}
    for key, value in values.items():
        if key == "name" or key not in known_keys:
            raise UsageError(f"{where}: unknown key {key!r}")
        kind = getattr(known_keys[key].type, "__name__", str(known_keys[key].type))
        wanted: type | tuple[type, ...] = {"int": int, "str": str, "bool": bool}.get(
            kind, (int, float)
        )
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "bool"):
            raise UsageError(f"{where}: {key} can't be {value!r}")
    try:
        profile = shape(name=name, **values)
    except TypeError:
        required = [key for key in _required(shape) if key not in values]
        raise UsageError(f"{where}: missing keys: {', '.join(required)}") from None
    _check(profile, where)
    return profile


def _required(shape: type[_Profile]) -> list[str]:
    defaults = shape.__init__.__defaults__ or ()
    names = [each.name for each in fields(shape)]
    return [name for name in names[: len(names) - len(defaults)] if name != "name"]


def _check(profile: DeviceProfile | ModelProfile | LinkProfile, where: str) -> None:
    for each in fields(profile):
        value = getattr(profile, each.name)
        if isinstance(value, str | bool):
            continue
        minimum = 0.0 if each.name in _MAY_BE_ZERO else math.ulp(0.0)
        maximum = 1.0 if each.name in _SHARES else _MAX_VALUE
        if not minimum <= value <= maximum:
            bound = "0 or more" if each.name in _MAY_BE_ZERO else "above 0"
            top = f" and at most {maximum:g}" if maximum == 1.0 or value > maximum else ""
            raise UsageError(f"{where}: {each.name} must be {bound}{top}, not {value:g}")
