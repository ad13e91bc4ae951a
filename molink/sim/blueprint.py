"""What the rings of a scenario are built of; as many rings as there are share it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from molink.errors import UsageError
from molink.facts.drafts import AUTO_DRAFTS, DraftModelFacts
from molink.facts.dtypes import DTYPE_SIZES, DType
from molink.facts.profile import Profile
from molink.facts.ringtimes import LinkFacts, RingTimes
from molink.ring.build import RingPlan
from molink.ring.hosted import NO_ROOM, HostRoom
from molink.ring.stage import StageShape
from molink.scheduler.chunk import max_chunk_rows
from molink.scheduler.limits import HeadLimits
from molink.scheduler.speculation.lookup import PromptLookup
from molink.sim.profiles import MBPS
from molink.sim.roofline import Roofline
from molink.sim.scenario import Scenario
from molink.sim.texts import Foresight
from molink.wire.messages.data import MAX_GROUPS

#: Activations travel as bf16.
DTYPE: DType = "bf16"
BLOCK_SIZE = 16
#: Longest prompt and answer together, unless the load has longer ones.
CONTEXT = 32_768
_MAX_WAITING = 1 << 20


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The stages of a scenario's ring, how much fits into them, and ``zeros`` for all rows."""

    scenario: Scenario
    stages: Sequence[Roofline]
    profiles: tuple[Profile, ...]
    hidden: int
    vocabulary: int
    blocks: int
    zeros: memoryview

    @classmethod
    def of(cls, scenario: Scenario, tenants: int = 1) -> "Blueprint":
        """That of ``scenario``; ``tenants`` stages share the memory of a device.

        Raises:
            UsageError: the model doesn't fit into the devices.
        """
        model, stages = scenario.model_profile, scenario.rooflines
        tokens = min(
            stage.kv_tokens(replace(device, memory_gb=device.memory_gb / tenants))
            for stage, device in zip(stages, scenario.device_profiles, strict=True)
        )
        if tokens < BLOCK_SIZE:
            raise UsageError(
                f"{scenario.model} doesn't fit into {scenario.stages} x {scenario.device}:"
                " add --stages"
            )
        hidden = model.hidden * scenario.tensors
        rows = max(max_chunk_rows(scenario.chunk_tokens), MAX_GROUPS)
        return cls(
            scenario,
            stages,
            tuple(stage.profile() for stage in stages),
            hidden,
            model.vocabulary,
            tokens // BLOCK_SIZE,
            memoryview(bytes(rows * hidden * DTYPE_SIZES[DTYPE])),
        )

    def shape(self, stage: int) -> StageShape:
        """A stage's place in the ring."""
        return StageShape(stage, len(self.stages), self.hidden, self.vocabulary, DTYPE)

    def plan(self, stage: int, epoch: int) -> RingPlan:
        """What a stage is told."""
        scenario = self.scenario
        return RingPlan(
            epoch,
            "",
            self.shape(stage),
            self._limits(),
            self._context,
            self.profiles[stage],
            scenario.policy,
            scenario.cut_through,
            scheduling_policy=scenario.scheduling_policy,
            host=self.host(stage),
            source=partial(Foresight, scenario.texts) if scenario.foresight else PromptLookup,
        )

    def host(self, stage: int) -> HostRoom:
        """Host memory of a stage for KV."""
        scenario = self.scenario
        pcie = scenario.device_profiles[stage].pcie_gbs * 1e9
        if scenario.preemption_mode == "recompute" or not pcie:
            return NO_ROOM
        block = BLOCK_SIZE * self.stages[stage].kv_token_bytes
        block_s = 0.0 if scenario.free_copies else block / pcie
        return HostRoom(int(scenario.swap_gb * 1e9 / block), block_s)

    @property
    def floor_s(self) -> float:
        """Seconds of a turn of the ring that waits for nothing, with a single row."""
        stages = len(self.stages)
        links = [self.scenario.link_from(stage) for stage in range(stages)]
        facts = tuple(LinkFacts(link.latency, link.bandwidth_mbps * MBPS) for link in links)
        return RingTimes(self.profiles, facts if stages > 1 else (), self._row_bytes).turn_s(1)

    @property
    def _context(self) -> int:
        load = self.scenario.workload
        fixed = load.input_tokens + load.output_tokens
        return max(CONTEXT, fixed, load.max_prompt + load.max_output)

    @property
    def _draft_model(self) -> DraftModelFacts | None:
        roofline = self.scenario.draft_roofline
        return None if roofline is None else DraftModelFacts(roofline.profile(), self._context)

    @property
    def _row_bytes(self) -> int:
        return self.hidden * DTYPE_SIZES[DTYPE]

    def _limits(self) -> HeadLimits:
        scenario = self.scenario
        return HeadLimits(
            blocks=self.blocks,
            block_size=BLOCK_SIZE,
            micro_batches=scenario.micro_batches,
            chunk_tokens=scenario.chunk_tokens,
            max_running=scenario.max_running,
            max_waiting=_MAX_WAITING,
            max_context=self._context,
            prefix_cache=scenario.workload.shares,
            profiles=self.profiles,
            stages=scenario.stages,
            row_bytes=self._row_bytes,
            unpaired=scenario.unpaired,
            draft_tokens=scenario.draft_tokens,
            ahead=scenario.ahead if scenario.draft_tokens == AUTO_DRAFTS else 0,
            draft_model=self._draft_model,
            preemption_mode=scenario.preemption_mode,
        )
