"""The small model that the head on this PC may ask for drafts: found, compared, planned."""

import hashlib
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_source import find_model
from molink.errors import UsageError
from molink.facts.footprint import StageSetup
from molink.facts.memory_plan import plan_memory
from molink.facts.model import BLOCK_SIZE
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.worker_pipe import DraftModelSpec
from molinkd.peer.agent.device_probe import MeasuredDevice
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.settings import Settings

#: Tokens of KV that it has room for, all requests together; or one request's, if that is more.
_KV_TOKENS = 16_384
#: Longest request that it is asked of.
_MAX_MODEL_LEN = 32_768


@dataclass(frozen=True, slots=True)
class DraftModelFolder:
    """A checked folder, by the name that was asked for."""

    name: str
    path: Path
    folder: ModelFolder

    @classmethod
    def find_draft(
        cls, name: str, unpack_into: Path, progress: Progress, stop: threading.Event
    ) -> "DraftModelFolder":
        """What ``name`` is, fetched or unpacked if need be.

        Raises:
            ModelError: there is no such model, or it can't be run.
            Unavailable: the hub can't be reached.
        """
        source = find_model(name, progress, stop, unpack_into=unpack_into)
        return cls(name, source.path, ModelFolder.open(source.path))

    def check_vocabulary(self, served: Path) -> None:
        """Whether its tokens are those of the model in the folder ``served``.

        Raises:
            UsageError: they are others.
        """
        mine, others = (Tokenizer.open(path).token_texts for path in (self.path, served))
        if _digest(mine) == _digest(others):
            return
        differs = next((one for one in sorted(others) if mine.get(one) != others[one]), None)
        what = (
            f"it has {len(mine)} tokens, not {len(others)}"
            if differs is None
            else f"token {differs} is {mine.get(differs)!r} there, and {others[differs]!r} here"
        )
        raise UsageError(
            f"--draft-model {self.name} has another vocabulary than the model that is served"
            f" ({what}); its guesses would be other tokens. Take a smaller model of the same family"
        )

    def plan_memory(
        self, setup: StageSetup, budget: int, block_size: int, context: int
    ) -> "DraftPlan":
        """What it takes of ``budget`` bytes, for requests of up to ``context`` tokens.

        Raises:
            UsageError: it doesn't fit.
        """
        facts = self.folder.placement_facts(self.name)
        longest = min(facts.max_model_len, context, _MAX_MODEL_LEN)
        layers = (0, self.folder.config.layers)
        plan = plan_memory(
            msgspec.structs.replace(facts, max_model_len=longest),
            layers,
            replace(setup, quantize="none"),
            budget,
            requests=-(-_KV_TOKENS // longest),
            block_size=block_size,
        )
        needed = plan.without_kv + plan.kv  # the stage's budget has the margin
        return DraftPlan(DraftModelSpec(model_dir=str(self.path), kv_bytes=plan.kv), needed)

    def reserve_memory(self, measured: MeasuredDevice, settings: Settings) -> MeasuredDevice:
        """The device, with the bytes of it that placement is to leave for this; none if too few.

        As :meth:`plan_memory` has them for the longest requests, and the dtype that this PC has
        set: what will be served isn't known yet.
        """
        setup = measured.stage_setup(settings.pipeline, settings.dtype)
        context = settings.max_model_len or _MAX_MODEL_LEN
        try:
            nbytes = self.plan_memory(setup, measured.device.memory, BLOCK_SIZE, context).nbytes
        except UsageError:
            return measured
        return replace(
            measured, device=msgspec.structs.replace(measured.device, draft_bytes=nbytes)
        )


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What a worker is told of a draft model, and the bytes of the device that this takes."""

    start: DraftModelSpec
    nbytes: int


def _digest(vocabulary: dict[int, str]) -> bytes:
    found = hashlib.sha256()
    for index, token in sorted(vocabulary.items()):
        found.update(b"%d %d " % (index, len(token)))
        found.update(token.encode("utf-8", "surrogatepass"))
    return found.digest()
