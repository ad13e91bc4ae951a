"""The parts that all rings of a scenario share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from molink.errors import UsageError
from molink.facts.drafts import AUTO_DRAFTS, DraftModelFacts
from molink.facts.dtypes import DTYPE_SIZES, DType
from molink.facts.profile import Profile
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.ring.build import RingPlan
from molink.ring.ring_measurements import NO_HOST_MEMORY, HostMemory
from molink.ring.stage import StageShape
from molink.scheduler.chunk_size import max_chunk_rows
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.speculation.prompt_lookup import PromptLookup
from molink.sim.known_text import OracleLookup
from molink.sim.profiles import MAX_MODEL_LEN, MBPS
from molink.sim.roofline import Roofline
from molink.sim.scenario import Scenario
from molink.wire.messages.data_plane import MAX_SLICES

DTYPE: DType = "bf16"
BLOCK_SIZE = 16
_MAX_QUEUE_LEN = 1 << 20


@dataclass(frozen=True, slots=True)
class RingTemplate:
    """The stages of a scenario's ring, their KV capacity, and ``zeros`` for all rows."""

    scenario: Scenario
    stages: Sequence[Roofline]
    profiles: tuple[Profile, ...]
    hidden: int
    vocabulary: int
    num_blocks: int
    zeros: memoryview

    @classmethod
    def from_scenario(cls, scenario: Scenario, tenants: int = 1) -> "RingTemplate":
        """Build the template; ``tenants`` stages share the memory of a device.

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
        hidden = model.hidden * scenario.tensors_per_row
        rows = max(max_chunk_rows(scenario.max_num_batched_tokens), MAX_SLICES)
        return cls(
            scenario,
            stages,
            tuple(stage.make_profile() for stage in stages),
            hidden,
            model.vocabulary,
            tokens // BLOCK_SIZE,
            memoryview(bytes(rows * hidden * DTYPE_SIZES[DTYPE])),
        )

    def stage_shape(self, stage: int) -> StageShape:
        return StageShape(stage, len(self.stages), self.hidden, self.vocabulary, DTYPE)

    def stage_plan(self, stage: int, epoch: int) -> RingPlan:
        scenario = self.scenario
        return RingPlan(
            epoch,
            "",
            self.stage_shape(stage),
            self._scheduler_config(),
            self._max_model_len,
            self.profiles[stage],
            scenario.policy,
            scenario.cut_through,
            scheduling_policy=scenario.scheduling_policy,
            host_memory=self.host_memory(stage),
            create_draft_source=partial(OracleLookup, scenario.texts)
            if scenario.oracle_drafts
            else PromptLookup,
        )

    def host_memory(self, stage: int) -> HostMemory:
        """Bytes of a stage's host memory for swapped KV."""
        scenario = self.scenario
        pcie = scenario.device_profiles[stage].pcie_gbs * 1e9
        if scenario.preemption_mode == "recompute" or not pcie:
            return NO_HOST_MEMORY
        block = BLOCK_SIZE * self.stages[stage].kv_token_bytes
        block_s = 0.0 if scenario.free_copies else block / pcie
        return HostMemory(int(scenario.swap_gb * 1e9 / block), block_s)

    @property
    def floor_s(self) -> float:
        """Seconds of an unloaded round trip with a single row."""
        stages = len(self.stages)
        links = [self.scenario.link_from(stage) for stage in range(stages)]
        facts = tuple(LinkFacts(link.latency, link.bandwidth_mbps * MBPS) for link in links)
        return RingTimes(self.profiles, facts if stages > 1 else (), self._row_bytes).round_trip_s(
            1
        )

    @property
    def _max_model_len(self) -> int:
        load = self.scenario.workload
        fixed = load.input_tokens + load.output_tokens
        return max(MAX_MODEL_LEN, fixed, load.max_prompt + load.max_output)

    @property
    def _draft_model(self) -> DraftModelFacts | None:
        roofline = self.scenario.draft_roofline
        return (
            None
            if roofline is None
            else DraftModelFacts(roofline.make_profile(), self._max_model_len)
        )

    @property
    def _row_bytes(self) -> int:
        return self.hidden * DTYPE_SIZES[DTYPE]

    def _scheduler_config(self) -> SchedulerConfig:
        scenario = self.scenario
        return SchedulerConfig(
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            micro_batches=scenario.micro_batches,
            max_num_batched_tokens=scenario.max_num_batched_tokens,
            max_num_seqs=scenario.max_num_seqs,
            max_queue_len=_MAX_QUEUE_LEN,
            max_model_len=self._max_model_len,
            prefix_cache=scenario.prefix_cache or scenario.workload.has_shared_prefixes,
            profiles=self.profiles,
            num_stages=scenario.stages,
            row_bytes=self._row_bytes,
            prefill_only_batches=scenario.prefill_only_batches,
            num_speculative_tokens=scenario.num_speculative_tokens,
            lookahead_volumes=scenario.lookahead_volumes
            if scenario.num_speculative_tokens == AUTO_DRAFTS
            else 0,
            draft_model=self._draft_model,
            preemption_mode=scenario.preemption_mode,
        )
