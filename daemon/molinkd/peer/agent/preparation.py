"""What a worker is started with: memory of the device, a draft model, kernels to avoid."""

import asyncio
import logging
import threading
from pathlib import Path

import msgspec

from molink.checkpoint.folder import ModelFolder
from molink.errors import MolinkError, UsageError
from molink.facts.kernels import INSTEAD
from molink.facts.memory_plan import MemoryPlan, plan_memory
from molink.facts.settings import PipelineSettings
from molink.swarm.agent.recovery import Recovery
from molink.wire.messages.instructions import Assign
from molink.wire.messages.pipe import Start
from molink.wire.sockets.curve import KeyPair
from molinkd.peer.agent.device_probe import Measured, worker_threads
from molinkd.peer.agent.draft_model import DraftModel, PlannedDraft
from molinkd.peer.agent.self_test import remembered
from molinkd.peer.artifacts.hashing import in_thread
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.home import Home
from molinkd.peer.quantize import check_quantize
from molinkd.peer.settings import Settings

log = logging.getLogger(__name__)


class NoRoomBesideError(UsageError):
    """A stage would fit by itself, but not beside those that run already."""


class Preparation:
    """Plans the stages of this PC, one beside the other."""

    def __init__(self, settings: Settings, keys: KeyPair, home: Home, recovery: Recovery) -> None:
        """While a ``recovery`` is under way, what is started has to hurry."""
        self._settings = settings
        self._keys = keys
        self._home = home
        self._recovery = recovery
        #: What the stage of each generation takes of the device.
        self._plans: dict[int, MemoryPlan] = {}
        self._measured: asyncio.Future[Measured] = asyncio.get_running_loop().create_future()

    def measured(self, device: Measured) -> None:
        """The device is known: stages may be started on it."""
        self._measured.set_result(device)

    @property
    def is_measured(self) -> bool:
        """Whether the device is known."""
        return self._measured.done()

    def over(self, generation: int) -> None:
        """That stage needs no memory any more."""
        self._plans.pop(generation, None)

    def close(self) -> None:
        """Nothing more is to be started."""
        self._measured.cancel()

    async def start(self, generation: int, assign: Assign, folder: Path) -> Start:
        """The order to a worker that is to hold a stage of the model in ``folder``.

        Waits until the device is known.

        Raises:
            MolinkError: it can't run here; says why.
        """
        opened = await asyncio.to_thread(ModelFolder.open, folder, assign.layers)
        measured = await asyncio.shield(self._measured)
        settings = self._settings
        check_quantize(assign.quantize, opened.config, measured.device.kind)
        draft = await self._plan_draft(folder, opened, assign, measured)
        beside = draft.nbytes if draft is not None else 0
        plan = plan_stage(opened, assign, measured, settings.pipeline, taken=beside)
        # What the same worker held before makes room.
        self._plans.pop(generation, None)
        plan = self._plans[generation] = self._beside(plan, opened, assign, measured, beside)
        log.info("layers %d:%d of %s: %s", *assign.layers, assign.model, plan)
        first, last = settings.worker_ports
        return Start(
            pipeline=assign.pipeline,
            stage=assign.stage,
            stages=assign.stages,
            layers=assign.layers,
            model_dir=str(folder),
            dtype=assign.dtype,
            device=measured.name,
            threads=worker_threads(settings) if measured.name == "cpu" else 0,
            public_key=self._keys.public,
            secret_key=self._keys.secret,
            bind=settings.host,
            ports=(first, last + 1),
            kv_bytes=plan.kv,
            block_size=assign.block_size,
            max_context=_context(opened, assign),
            settings=settings.pipeline,
            stages_here=settings.stages_here,
            profile_cache=str(self._home.profiles),
            quantize=assign.quantize,
            memory=0 if measured.name == "cpu" else plan.budget + beside,
            hurry=self._recovery.under_way,
            avoid=self._avoided(measured),
            proofs=str(self._home.proofs),
            draft=None if draft is None else draft.start,
        )

    async def _plan_draft(
        self, folder: Path, opened: ModelFolder, assign: Assign, measured: Measured
    ) -> PlannedDraft | None:
        """The draft model beside the first stage, if one is set and there is room for both."""
        name = self._settings.draft_model
        if not name or assign.stage:
            return None
        setup = measured.setup(self._settings.pipeline, assign.dtype, assign.quantize)
        context, into = _context(opened, assign), self._home.unpacked

        def plan(stop: threading.Event) -> PlannedDraft:
            model = DraftModel.find(name, into, Progress(), stop)
            model.check(folder)
            found = model.plan(setup, measured.device.memory, assign.block_size, context)
            plan_stage(opened, assign, measured, self._settings.pipeline, taken=found.nbytes)
            return found

        try:
            return await in_thread(plan)
        except (MolinkError, OSError) as error:
            log.warning("no draft model: %s", error)
            return None

    def _avoided(self, measured: Measured) -> tuple[str, ...]:
        """Kernels that failed `molink doctor` here."""
        avoid = remembered(self._home.avoid, measured.device.name)
        for name in avoid:
            log.warning("%s failed `molink doctor` here: %s in its place", name, INSTEAD[name])
        return avoid

    def _beside(
        self,
        alone: MemoryPlan,
        opened: ModelFolder,
        assign: Assign,
        measured: Measured,
        draft: int,
    ) -> MemoryPlan:
        """The plan of a stage beside those that run already, and ``draft`` bytes of a draft model.

        A CPU takes memory for KV only as it is used, so the pool is that of a stage ``alone``: it
        is that soon, and until then holds the same requests as the other one.

        Raises:
            NoRoomBesideError: there is too little memory for both.
        """
        on_cpu = measured.device.kind == "cpu"
        taken = sum(one.without_kv + one.kv * (not on_cpu) for one in self._plans.values())
        if not taken:
            return alone
        try:
            settings = self._settings.pipeline
            beside = plan_stage(opened, assign, measured, settings, taken=taken + draft)
        except UsageError as error:
            raise NoRoomBesideError(f"beside another stage: {error}") from error
        return alone if on_cpu else beside


def _context(folder: ModelFolder, assign: Assign) -> int:
    """Most tokens of a request."""
    return min(folder.config.context, assign.context or folder.config.context)


def plan_stage(
    folder: ModelFolder,
    assign: Assign,
    measured: Measured,
    settings: PipelineSettings,
    *,
    taken: int = 0,
) -> MemoryPlan:
    """How the device's memory is shared out for a stage; ``taken`` bytes are others' already.

    Raises:
        UsageError: it isn't enough; says what would fit.
    """
    return plan_memory(
        msgspec.structs.replace(folder.facts(assign.model), context=_context(folder, assign)),
        assign.layers,
        measured.setup(settings, assign.dtype, assign.quantize),
        max(0, measured.device.memory - taken),
        requests=settings.max_running,
        block_size=assign.block_size,
    )
