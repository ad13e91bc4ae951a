"""Finds, checks and plans the draft model that runs with the first stage."""

import hashlib
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from molink.checkpoint.model_folder import ModelFolder
from molink.errors import UsageError
from molink.facts.footprint import StageSetup
from molink.facts.memory_plan import plan_memory
from molink.facts.model import BLOCK_SIZE
from molink.wire.messages.worker_pipe import DraftModelSpec
from molinkd.peer.agent.device_probe import MeasuredDevice
from molinkd.peer.artifacts.transfers import Progress
from molinkd.peer.settings import Settings

#: KV cache capacity in tokens over all requests, or one maximal request if that is longer.
_KV_TOKENS = 16_384
#: Longest request that gets drafts, in tokens.
_MAX_MODEL_LEN = 32_768


@dataclass(frozen=True, slots=True)
class DraftModelFolder:
    """A validated draft model and the name that it was requested by."""

    name: str
    path: Path
    folder: ModelFolder

    @classmethod
    def find_draft(
        cls, name: str, unpack_into: Path, progress: Progress, stop: threading.Event
    ) -> "DraftModelFolder":
        """Find the model ``name``, fetching or unpacking it if necessary.

        Raises:
            ModelError: The model does not exist or is not supported.
            UsageError: It has recurrent layers.
            Unavailable: The hub can't be reached.
        """
        from molink.checkpoint.model_source import find_model

        source = find_model(name, progress, stop, unpack_into=unpack_into)
        folder = ModelFolder.open(source.path)
        if folder.config.keeps_states:
            raise UsageError(
                f"--draft-model {name} has recurrent layers, which draft models can't have: use "
                "a model that has attention only"
            )
        return cls(name, source.path, folder)

    def check_served(self, served: Path) -> None:
        """Check that the model in the folder ``served`` can use its drafts.

        Raises:
            UsageError: The vocabularies differ.
        """
        from molink.text.tokenizer import Tokenizer

        mine, others = (Tokenizer.open(path).token_texts for path in (self.path, served))
        if _digest(mine) == _digest(others):
            return
        differs = next((one for one in sorted(others) if mine.get(one) != others[one]), None)
        what = (
            f"{len(mine)} tokens instead of {len(others)}"
            if differs is None
            else f"token {differs} is {mine.get(differs)!r} instead of {others[differs]!r}"
        )
        raise UsageError(
            f"--draft-model {self.name} has a different vocabulary than the served model"
            f" ({what}). Use a smaller model of the same family"
        )

    def plan_memory(
        self, setup: StageSetup, budget: int, block_size: int, context: int
    ) -> "DraftPlan":
        """Plan memory within ``budget`` bytes for requests of up to ``max_model_len`` tokens.

        Raises:
            UsageError: The model does not fit.
        """
        facts = self.folder.placement_facts(self.name)
        longest = min(facts.max_model_len, context, _MAX_MODEL_LEN)
        layers = (0, self.folder.config.layers)
        plan = plan_memory(
            msgspec.structs.replace(facts, max_model_len=longest),
            layers,
            replace(setup, quantize="none", kv_cache_dtype="auto"),
            budget,
            requests=-(-_KV_TOKENS // longest),
            block_size=block_size,
        )
        needed = plan.without_kv + plan.kv  # the stage's budget contains the safety margin
        return DraftPlan(DraftModelSpec(model_dir=str(self.path), kv_bytes=plan.kv), needed)

    def reserve_memory(self, measured: MeasuredDevice, settings: Settings) -> MeasuredDevice:
        """``measured`` with the bytes reserved for the draft model; unchanged if it does not fit.

        Assumes maximal requests and this PC's dtype, since the served model is not known yet.
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
    """The draft model's order to the worker, and the device bytes that it uses."""

    start: DraftModelSpec
    nbytes: int


def _digest(vocabulary: dict[int, str]) -> bytes:
    found = hashlib.sha256()
    for index, token in sorted(vocabulary.items()):
        found.update(b"%d %d " % (index, len(token)))
        found.update(token.encode("utf-8", "surrogatepass"))
    return found.digest()
