"""What is to be simulated: a ring, its links, its switches and its load."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from molink.errors import UsageError
from molink.facts.drafts import AUTO_DRAFTS, MAX_DRAFTS, MAX_LOOKAHEAD
from molink.facts.settings import PreemptionMode
from molink.scheduler.policies.create import create_scheduling_policy
from molink.sim.known_text import KnownText
from molink.sim.profiles import DeviceProfile, LinkProfile, ModelProfile, load_device, load_model
from molink.sim.roofline import Roofline, split_layers, stage_rooflines
from molink.sim.workload import Workload
from molink.wire.messages.data_plane import MAX_MICRO_BATCHES

Compression = Literal["none", "lossless"]

#: Stages of a ring, as many as the wire can name.
MAX_STAGES = 64


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulation. The defaults are the product's own: all switches on.

    The baseline of every comparison is ``policy="fifo"`` or ``"concurrent"`` with
    ``cut_through=False``, ``compression="none"``, ``micro_batches=stages``, ``unpaired=False`` and
    ``max_num_batched_tokens=workload.max_prompt`` (a prompt is one volume, stored and forwarded);
    see :meth:`make_baseline`.

    ``micro_batches`` 0 leaves ``K`` to the head, ``max_num_batched_tokens`` 0 the rows of a prefill
    volume. ``tensors_per_row`` per row and hop is 2 where hidden and residual travel apart (vLLM
    0.7). ``compression_ratio`` is what lossless compression shrinks rows to ``1 / ratio`` (bf16:
    1.43 to 1.47 were measured). ``max_num_seqs`` requests hold KV blocks at a time. ``policy`` is
    that of the links, ``scheduling_policy`` that of the head. ``prefill_only_batches`` lets prefill
    chunks go without decode rows as long as nobody who decodes waits for them
    (:mod:`molink.scheduler.micro_batches`). ``devices`` and ``layers`` are those of each stage, if
    they differ or aren't shared out evenly. ``links`` are those from each stage to the next, if
    they differ. ``shape`` is the model's, if it has no profile of that name. With ``texts``,
    request ``i`` is the ``i``-th of them, from the first again after the last, and the workload's
    sizes have to be theirs. Without, prompts and answers have no content, and there can't be
    ``num_speculative_tokens`` (of a request in a pass; 0: none, -1: as many as pay; up to
    ``lookahead_volumes`` passes go on from those). With ``oracle_drafts`` nothing is drafted beyond
    the first wrong draft. What becomes of the KV of who is preempted says ``preemption_mode``; each
    stage has ``swap_gb`` (GB) of host memory for it. With ``free_copies``, copies from and to it
    take no time: more can't be had of any mode. A ``draft_model`` beside the first stage takes its
    time by its shape, and guesses what its texts say.

    Raises:
        UsageError: a number is out of range, or there is no profile or policy of that name.
    """

    workload: Workload
    stages: int = 3
    device: str = "rtx4090"
    model: str = "qwen-7b"
    link: LinkProfile = field(default_factory=LinkProfile)
    policy: str = "adaptive"
    cut_through: bool = True
    compression: Compression = "lossless"
    micro_batches: int = 0
    tensors_per_row: int = 1
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 256
    compression_ratio: float = 1.45
    scheduling_policy: str = "fcfs"
    prefill_only_batches: bool = True
    devices: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    links: tuple[LinkProfile, ...] = ()
    shape: ModelProfile | None = None
    texts: tuple[KnownText, ...] = ()
    num_speculative_tokens: int = 0
    lookahead_volumes: int = MAX_LOOKAHEAD
    oracle_drafts: bool = False
    draft_model: str = ""
    preemption_mode: PreemptionMode = "recompute"
    swap_gb: float = 32.0
    free_copies: bool = False

    def __post_init__(self) -> None:
        bounds: dict[str, tuple[float, float, float]] = {
            "--stages": (self.stages, 1, MAX_STAGES),
            "--micro-batches": (self.micro_batches, 0, MAX_MICRO_BATCHES),
            "--tensors": (self.tensors_per_row, 1, 2),
            "--max-num-batched-tokens": (self.max_num_batched_tokens, 0, 1 << 16),
            "--max-num-seqs": (self.max_num_seqs, 1, 1024),
            "num_speculative_tokens": (
                self.num_speculative_tokens,
                AUTO_DRAFTS if self.texts else 0,
                MAX_DRAFTS if self.texts else 0,
            ),
            "ahead": (self.lookahead_volumes, 0, MAX_LOOKAHEAD),
            "swap_gb": (self.swap_gb, 0, 1 << 16),
            "--compression-ratio": (self.compression_ratio, 1, 100),
        }
        for option, (value, minimum, maximum) in bounds.items():
            if not minimum <= value <= maximum:
                raise UsageError(
                    f"{option} has to be from {minimum:g} to {maximum:g}, not {value:g}"
                )
        if self.compression not in ("none", "lossless"):
            raise UsageError(f"--compression is none or lossless, not {self.compression}")
        create_scheduling_policy(self.scheduling_policy)
        if self.stages > self.model_profile.layers:
            raise UsageError(
                f"{self.model} has {self.model_profile.layers} layers: too few for {self.stages}"
                " stages"
            )

    @classmethod
    def make_baseline(
        cls,
        workload: Workload,
        policy: str = "fifo",
        stages: int = 3,
        link: LinkProfile | None = None,
        device: str = "rtx4090",
        model: str = "qwen-7b",
    ) -> "Scenario":
        """All switches off: one tensor per hop, whole prompts stored and forwarded, ``K = N``."""
        return cls(
            workload,
            stages,
            device,
            model,
            link if link is not None else LinkProfile(),
            policy,
            cut_through=False,
            compression="none",
            micro_batches=stages,
            max_num_batched_tokens=workload.max_prompt,
            prefill_only_batches=False,
        )

    @property
    def device_profiles(self) -> tuple[DeviceProfile, ...]:
        """The device of each stage."""
        if not self.devices:
            return (load_device(self.device),) * self.stages
        return tuple(load_device(name) for name in self.devices)

    def link_from(self, index: int) -> LinkProfile:
        """The link from stage ``index`` to the next."""
        return self.links[index] if self.links else self.link

    @property
    def layer_split(self) -> tuple[int, ...]:
        """The layers of each stage."""
        return self.layers or tuple(split_layers(self.model_profile.layers, self.stages))

    @property
    def rooflines(self) -> Sequence[Roofline]:
        """The stages."""
        return stage_rooflines(self.device_profiles, self.model_profile, self.layer_split)

    @property
    def draft_roofline(self) -> Roofline | None:
        """The draft model on the first stage's device."""
        if not self.draft_model:
            return None
        model = load_model(self.draft_model)
        return Roofline(self.device_profiles[0], model, model.layers, is_last=True)

    @property
    def model_profile(self) -> ModelProfile:
        """The model's shape."""
        return self.shape or load_model(self.model)

    @property
    def switches(self) -> dict[str, object]:
        """What tells one run of a comparison from another, as in the result's JSON."""
        return {
            "policy": self.policy,
            "scheduling_policy": self.scheduling_policy,
            "preemption_mode": self.preemption_mode,
            "cut_through": self.cut_through,
            "unpaired": self.prefill_only_batches,
            "compression": self.compression,
            "micro_batches": self.micro_batches or "auto",
            "tensors": self.tensors_per_row,
            "max_num_batched_tokens": self.max_num_batched_tokens or "auto",
        }
