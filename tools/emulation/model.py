"""An emulated model as a worker sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from molink.checkpoint.adapters import Adapter
from molink.errors import UsageError
from molink.facts.dtypes import DTYPE_SIZES, WeightDType
from molink.facts.profile import Profile
from molink.sim.profiles import DeviceProfile, ModelProfile, load_device, load_model
from molink.sim.roofline import Roofline, split_layers, stage_rooflines

DTYPE: WeightDType = "bf16"
#: Longest prompt and answer together.
CONTEXT = 32_768


class Emulation(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Settings of a ring's stages; devices and models as in ``molink simulate``.

    ``activations`` is a file of recorded rows. ``devices`` and ``layers`` override the even split
    per stage. ``hot``: a stage, the step from which it is slower, and its slowdown. ``serves``:
    requests will come, so a stage imports torch when it is loaded.
    """

    activations: str
    stages: int = 3
    device: str = "rtx4090"
    model: str = "qwen-7b"
    devices: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    hot: tuple[int, int, float] | None = None
    serves: bool = True

    @cached_property
    def device_profiles(self) -> Sequence[DeviceProfile]:
        """The device of each stage."""
        return [load_device(name) for name in self.devices or (self.device,) * self.stages]

    @cached_property
    def model_profile(self) -> ModelProfile:
        """The model's shape."""
        return load_model(self.model)

    @cached_property
    def rooflines(self) -> Sequence[Roofline]:
        """Step times of each stage."""
        layers = self.layers or split_layers(self.model_profile.layers, self.stages)
        return stage_rooflines(self.device_profiles, self.model_profile, layers)

    @cached_property
    def profiles(self) -> tuple[Profile, ...]:
        """The same as measured profiles; an emulated step is not interleaved."""
        profiles = (each.make_profile() for each in self.rooflines)
        return tuple(msgspec.structs.replace(each, interleaves=False) for each in profiles)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row between stages."""
        return self.model_profile.hidden * DTYPE_SIZES[DTYPE]


def read_emulation(data: bytes) -> Emulation:
    """Decode settings from JSON."""
    try:
        return msgspec.json.decode(data, type=Emulation)
    except msgspec.MsgspecError as error:
        raise UsageError(f"invalid emulation settings: {error}") from error


@dataclass(frozen=True, slots=True)
class EmulatedConfig:
    """Stands for :class:`molink.checkpoint.config.ModelConfig` in a worker."""

    hidden_size: int
    vocab_size: int
    max_model_len: int = CONTEXT
    keys_depend_on_length: bool = False
    keeps_states: bool = False
    short_context: int = 0
    adapters: tuple[Adapter, ...] = ()
    vision: None = None


@dataclass(frozen=True, slots=True)
class EmulatedStage:
    """Stands for :class:`molink.stage.stage.Stage` in a worker, without memory."""

    emulation: Emulation
    index: int

    @property
    def roofline(self) -> Roofline:
        """Times of its steps."""
        return self.emulation.rooflines[self.index]

    def slowed(self, steps: int) -> float:
        """Slowdown of the next step after ``steps`` steps."""
        hot = self.emulation.hot
        return hot[2] if hot is not None and hot[0] == self.index and steps >= hot[1] else 1.0

    @property
    def config(self) -> EmulatedConfig:
        """Shapes."""
        model = self.emulation.model_profile
        return EmulatedConfig(model.hidden, model.vocabulary)

    @property
    def dtype(self) -> WeightDType:
        """Type in which it would compute."""
        return DTYPE

    @property
    def wire_dtype(self) -> WeightDType:
        """Type of rows between stages."""
        return DTYPE

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage samples."""
        return self.index == self.emulation.stages - 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights."""
        return int(self.emulation.rooflines[self.index].weight_bytes)

    @property
    def host_expert_bytes(self) -> int:
        """No experts in host memory."""
        return 0

    @property
    def resident_share(self) -> float:
        """No experts are elsewhere."""
        return 0.0

    @property
    def kv_tokens(self) -> int:
        """KV tokens that the device would hold."""
        device = self.emulation.device_profiles[self.index]
        return self.emulation.rooflines[self.index].kv_tokens(device)

    def block_bytes(self, block_size: int) -> int:
        """A byte per token, so that ``LoadStage`` can count in tokens."""
        return block_size

    def count_blocks(self, nbytes: int, block_size: int) -> int:
        """Blocks of that many tokens."""
        return nbytes // block_size

    def pool_bytes(self, blocks: int, block_size: int) -> int:
        """A byte per token."""
        return blocks * block_size

    def allocate_kv_pool(self, blocks: int, block_size: int) -> None:
        """Do nothing."""

    def open_host_pool(self, nbytes: int, stages_per_host: int) -> tuple[int, float]:
        """No host memory: preempted requests are recomputed."""
        return 0, 0.0
