"""Prepares the order that starts a worker: memory plan, draft model, disabled kernels."""

import asyncio
import logging
import threading
from pathlib import Path

import msgspec

from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.quantize_check import check_quantize
from molink.errors import MolinkError, UsageError
from molink.facts.kernels import FALLBACKS
from molink.facts.layer_range import format_layers
from molink.facts.memory_plan import MemoryPlan, plan_memory
from molink.facts.settings import PipelineSettings
from molink.swarm.agent.recovery import RecoveryTimer
from molink.wire.messages.instructions import Assign
from molink.wire.messages.worker_pipe import LoadStage
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.agent.device_probe import MeasuredDevice, num_worker_threads
from molinkd.peer.agent.draft_model import DraftModelFolder, DraftPlan
from molinkd.peer.agent.kernel_self_test import load_disabled_kernels
from molinkd.peer.artifacts.hashing import run_in_thread
from molinkd.peer.artifacts.transfers import Progress
from molinkd.peer.home import Home
from molinkd.peer.settings import Settings

log = logging.getLogger(__name__)


class NoRoomBesideError(UsageError):
    """The stage fits on its own, but not together with the running ones."""


class StagePreparation:
    """Plans memory for this PC's stages, which may run side by side during a migration."""

    def __init__(
        self, settings: Settings, keys: KeyPair, home: Home, recovery: RecoveryTimer
    ) -> None:
        """During a ``recovery``, workers skip optional preparation."""
        self._settings = settings
        self._keys = keys
        self._home = home
        self._recovery = recovery
        #: Memory plan of the stage of each generation.
        self._plans: dict[int, MemoryPlan] = {}
        self._measured: asyncio.Future[MeasuredDevice] = asyncio.get_running_loop().create_future()

    def set_device(self, device: MeasuredDevice) -> None:
        """Set the measured device, which :meth:`prepare_stage` waits for; or change it."""
        if self.is_measured:
            self._measured = asyncio.get_running_loop().create_future()
        self._measured.set_result(device)

    @property
    def is_measured(self) -> bool:
        """Whether the device has been measured."""
        return self._measured.done()

    @property
    def device(self) -> MeasuredDevice:
        """The measured device."""
        return self._measured.result()

    def release_memory(self, generation: int) -> None:
        """Release the memory of the stage of ``generation``."""
        self._plans.pop(generation, None)

    def close(self) -> None:
        """Cancel waiting preparations."""
        self._measured.cancel()

    async def prepare_stage(self, generation: int, assign: Assign, folder: Path) -> LoadStage:
        """The order for a worker to load a stage of the model in ``folder``.

        Waits until the device is measured.

        Raises:
            MolinkError: The stage can't run on this PC.
        """
        opened = await asyncio.to_thread(ModelFolder.open, folder, assign.layers)
        measured = await asyncio.shield(self._measured)
        settings = self._settings
        check_quantize(assign.quantize, opened.config, measured.device.kind)
        draft = await self._plan_draft(folder, opened, assign, measured)
        draft_bytes = draft.nbytes if draft is not None else 0
        plan = plan_stage(opened, assign, measured, settings.pipeline, taken=draft_bytes)
        # The same worker releases its previous stage.
        self._plans.pop(generation, None)
        plan = self._plans[generation] = self._plan_beside_others(
            plan, opened, assign, measured, draft_bytes
        )
        log.info("layers %s of %s: %s", format_layers(assign.layers), assign.model, plan)
        first, last = settings.worker_ports
        return LoadStage(
            pipeline=assign.pipeline,
            stage=assign.stage,
            stages=assign.stages,
            layers=assign.layers,
            model_dir=str(folder),
            dtype=assign.dtype,
            device=measured.name,
            threads=num_worker_threads(settings)
            if measured.name == "cpu" or plan.host_experts
            else 0,
            public_key=self._keys.public,
            secret_key=self._keys.secret,
            bind=settings.host,
            ports=(first, last + 1),
            kv_bytes=plan.kv,
            block_size=assign.block_size,
            max_model_len=_max_model_len(opened, assign),
            settings=settings.pipeline,
            stages_per_host=settings.stages_per_host,
            profile_cache=str(self._home.profiles),
            quantize=assign.quantize,
            kv_cache_dtype=assign.kv_cache_dtype,
            memory_limit=0 if measured.name == "cpu" else plan.budget + draft_bytes,
            skip_optional=self._recovery.is_active,
            disabled_kernels=self._disabled_kernels(measured),
            required_kernels=measured.required_kernels,
            kernel_checks_path=str(self._home.kernel_checks),
            draft=None if draft is None else draft.start,
            host_experts=plan.host_experts,
        )

    async def _plan_draft(
        self, folder: Path, opened: ModelFolder, assign: Assign, measured: MeasuredDevice
    ) -> DraftPlan | None:
        """The draft model of the first stage, if one is configured and both fit."""
        name = self._settings.draft_model
        if not name or assign.stage:
            return None
        setup = measured.stage_setup(self._settings.pipeline, assign.dtype, assign.quantize)
        context, into = _max_model_len(opened, assign), self._home.unpacked

        def plan(stop: threading.Event) -> DraftPlan:
            model = DraftModelFolder.find_draft(name, into, Progress(), stop)
            model.check_served(folder)
            found = model.plan_memory(setup, measured.device.memory, assign.block_size, context)
            plan_stage(opened, assign, measured, self._settings.pipeline, taken=found.nbytes)
            return found

        try:
            return await run_in_thread(plan)
        except (MolinkError, OSError) as error:
            log.warning("no draft model: %s", error)
            return None

    def _disabled_kernels(self, measured: MeasuredDevice) -> tuple[str, ...]:
        """Kernels that failed `molink doctor` on this device."""
        avoid = load_disabled_kernels(self._home.disabled_kernels, measured.device.name)
        for name in avoid:
            log.warning(
                "%s failed `molink doctor` on this PC: using %s instead", name, FALLBACKS[name]
            )
        return avoid

    def _plan_beside_others(
        self,
        alone: MemoryPlan,
        opened: ModelFolder,
        assign: Assign,
        measured: MeasuredDevice,
        draft: int,
    ) -> MemoryPlan:
        """The plan of a stage next to the running ones and ``draft_bytes`` of a draft model.

        A CPU commits KV memory only as it is used. The pool is therefore sized as for a stage
        ``alone``, which it soon is; until then it holds the same requests as the stage that it
        replaces.

        Raises:
            NoRoomBesideError: There is too little memory for both.
        """
        on_cpu = measured.device.kind == "cpu"
        taken = sum(one.without_kv + one.kv * (not on_cpu) for one in self._plans.values())
        if not taken:
            return alone
        beside = sum(one.host_expert_bytes for one in self._plans.values())
        try:
            settings = self._settings.pipeline
            draft_bytes = plan_stage(
                opened, assign, measured, settings, taken=taken + draft, host_taken=beside
            )
        except UsageError as error:
            raise NoRoomBesideError(f"with another stage loaded: {error}") from error
        return alone if on_cpu else draft_bytes


def _max_model_len(folder: ModelFolder, assign: Assign) -> int:
    """Longest request in tokens."""
    return min(folder.config.max_model_len, assign.max_model_len or folder.config.max_model_len)


def plan_stage(
    folder: ModelFolder,
    assign: Assign,
    measured: MeasuredDevice,
    settings: PipelineSettings,
    *,
    taken: int = 0,
    host_taken: int = 0,
) -> MemoryPlan:
    """Plan the device's memory for a stage, ``taken`` bytes of which are in use already.

    ``host_taken`` are those in use of the host memory for experts.

    Raises:
        UsageError: The stage does not fit; the message says what would.
    """
    host = measured.device.expert_host
    return plan_memory(
        msgspec.structs.replace(
            folder.placement_facts(assign.model), max_model_len=_max_model_len(folder, assign)
        ),
        assign.layers,
        measured.stage_setup(settings, assign.dtype, assign.quantize, assign.kv_cache_dtype),
        max(0, measured.device.memory - taken),
        expert_memory=0 if host is None else max(0, host.memory - host_taken),
        requests=settings.max_num_seqs,
        block_size=assign.block_size,
    )
