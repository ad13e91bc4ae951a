"""Scenario of a simulation: ring, links, features and workload."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from molink.errors import UsageError
from molink.facts.drafts import AUTO_DRAFTS, MAX_DRAFTS, MAX_LOOKAHEAD
from molink.facts.settings import PreemptionMode
from molink.scheduler.policies.create import create_scheduling_policy
from molink.sim.known_text import KnownText
from molink.sim.profiles import DeviceProfile, LinkProfile, ModelProfile, load_device, load_model
from molink.sim.roofline import HostShare, Roofline, split_layers, stage_rooflines
from molink.sim.workload import Workload, check_ranges
from molink.wire.messages.data_plane import MAX_MICRO_BATCHES

Compression = Literal["none", "lossless"]

#: Maximum number of stages that the wire can address.
MAX_STAGES = 64


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulation, by default with all features on.

    :meth:`make_baseline` builds baselines: ``policy="fifo"`` or ``"concurrent"`` with
    ``cut_through=False``, ``compression="none"``, ``micro_batches=stages``,
    ``prefill_only_batches=False`` and ``max_num_batched_tokens=workload.max_prompt`` (a prompt is
    one volume, stored and forwarded).

    Scheduling settings are those of :class:`molink.scheduler.config.SchedulerConfig`. ``policy``
    applies to links, ``scheduling_policy`` to the scheduler. ``tensors_per_row`` is 2 if hidden
    state and residual are sent separately (vLLM 0.7). Lossless compression shrinks rows to ``1 /
    compression_ratio`` (bf16: 1.43 to 1.47 measured). ``devices``, ``layers``, ``links`` and
    ``hosts`` (experts in host memory) are per stage, if they differ; ``shape`` replaces the model's
    profile.

    With ``texts``, request ``i`` uses the ``i``-th text, cyclically, and the workload must have the
    texts' sizes. Without them, prompts and answers have no content, so there are no drafts.
    ``oracle_drafts`` stops lookup before the first wrong draft. ``prefix_cache`` keeps the KV of
    finished requests, and their answers for drafts; it is always on if the workload's prompts share
    prefixes. Each stage has ``swap_gb`` (GB) of host memory for ``preemption_mode``;
    ``free_copies`` makes its copies instantaneous, as an upper bound. A ``draft_model`` runs on the
    first stage's device; its shape determines its time, and it proposes the texts' known drafts.

    Raises:
        UsageError: a number is out of range, or a profile or policy is unknown.
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
    prefix_cache: bool = False
    draft_model: str = ""
    preemption_mode: PreemptionMode = "recompute"
    swap_gb: float = 32.0
    free_copies: bool = False
    hosts: tuple[HostShare | None, ...] = ()

    def __post_init__(self) -> None:
        most_drafts = MAX_DRAFTS if self.texts else 0
        least_drafts = AUTO_DRAFTS if self.texts else 0
        check_ranges(
            {
                "--stages": (self.stages, 1, MAX_STAGES),
                "--micro-batches": (self.micro_batches, 0, MAX_MICRO_BATCHES),
                "--tensors": (self.tensors_per_row, 1, 2),
                "--max-num-batched-tokens": (self.max_num_batched_tokens, 0, 1 << 16),
                "--max-num-seqs": (self.max_num_seqs, 1, 1024),
                "num_speculative_tokens": (self.num_speculative_tokens, least_drafts, most_drafts),
                "lookahead_volumes": (self.lookahead_volumes, 0, MAX_LOOKAHEAD),
                "swap_gb": (self.swap_gb, 0, 1 << 16),
                "--compression-ratio": (self.compression_ratio, 1, 100),
            }
        )
        if self.compression not in ("none", "lossless"):
            raise UsageError(f"--compression must be none or lossless, not {self.compression}")
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
        """Build a scenario with all features off: whole prompts stored and forwarded, ``K = N``."""
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
        """Return the link from stage ``index`` to the next stage."""
        return self.links[index] if self.links else self.link

    @property
    def layer_split(self) -> tuple[int, ...]:
        """Layers per stage."""
        return self.layers or tuple(split_layers(self.model_profile.layers, self.stages))

    @property
    def rooflines(self) -> Sequence[Roofline]:
        return stage_rooflines(
            self.device_profiles, self.model_profile, self.layer_split, self.hosts
        )

    @property
    def draft_roofline(self) -> Roofline | None:
        """The draft model on the first stage's device."""
        if not self.draft_model:
            return None
        model = load_model(self.draft_model)
        return Roofline(self.device_profiles[0], model, model.layers, is_last=True)

    @property
    def model_profile(self) -> ModelProfile:
        return self.shape or load_model(self.model)

    @property
    def switches(self) -> dict[str, object]:
        """Return the features that distinguish the runs of a comparison, for the result's JSON."""
        return {
            "policy": self.policy,
            "scheduling_policy": self.scheduling_policy,
            "preemption_mode": self.preemption_mode,
            "cut_through": self.cut_through,
            "prefill_only_batches": self.prefill_only_batches,
            "compression": self.compression,
            "micro_batches": self.micro_batches or "auto",
            "tensors": self.tensors_per_row,
            "max_num_batched_tokens": self.max_num_batched_tokens or "auto",
        }
