"""Loads a stage on torch, and measures it."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.folder import ModelFolder
from molink.errors import MolinkError, UsageError
from molink.facts.drafts import DraftModelFacts
from molink.facts.profile import Profile
from molink.stage.decoder.decoder import HeldWeights
from molink.stage.measure.proof import prove
from molink.stage.measure.stage_profile import profile_stage
from molink.stage.out_of_memory import limit_memory, release_cached
from molink.stage.stage import Stage, find_device
from molink.text.matcher import Grammars
from molink.wire.messages.pipe import Start
from molinkd.worker.drafter import Drafter, DraftThread
from molinkd.worker.engine import DraftEngine, Engine
from molinkd.worker.executor import Executor

log = logging.getLogger(__name__)


#: Is told how many bytes of a stage's weights are loaded, and how many there are.
TellLoading = Callable[[int, int], None]


def load_engine(start: Start, tell: TellLoading = lambda *_: None) -> Engine:
    """The stage of ``start``, loaded and measured.

    Raises:
        MolinkError: it can't be loaded.
    """
    return _engine(start, tell, _load_stage(start, tell), _load_draft(start))


def _change_engine(
    old: Stage, draft: DraftEngine | None, before: Start, tell: TellLoading, start: Start
) -> Engine:
    """The stage of ``start`` in place of ``old``, that of ``before``."""
    held = old.hand_over(start.layers)
    if before.draft != start.draft:
        draft = None
    if _weights(before) != _weights(start):
        held = HeldWeights()
    release_cached()
    log.info("layers %s are held already", sorted(held.blocks) or "none")
    stage = _load_stage(start, tell, held)
    return _engine(start, tell, stage, draft or _load_draft(start))


def _weights(start: Start) -> tuple[object, ...]:
    """What layers have to have in common to be the same in memory."""
    return start.model_dir, start.dtype, start.device, start.quantize, start.avoid


def _engine(start: Start, tell: TellLoading, stage: Stage, draft: DraftEngine | None) -> Engine:
    began = time.perf_counter()
    profile = _profile(stage, start, start.kv_bytes)
    return Engine(
        stage,
        profile,
        partial(Executor, stage),
        partial(_change_engine, stage, draft, start, tell),
        grammars=_grammars(stage, start),
        draft=draft,
        profile_s=time.perf_counter() - began,
    )


def _grammars(stage: Stage, start: Start) -> Grammars | None:
    return Grammars(Path(start.model_dir), stage.config.vocab_size) if stage.is_last else None


def _load_stage(start: Start, tell: TellLoading, held: HeldWeights | None = None) -> Stage:
    folder = ModelFolder.open(Path(start.model_dir), start.layers)
    if start.max_context > folder.config.context:
        raise UsageError(
            f"a context of {start.max_context} tokens is more than the model's"
            f" {folder.config.context}"
        )
    limit_memory(start.device, start.memory)
    avoid = _prove(start, folder.config) if start.proofs else start.avoid

    def on_layer(layers: int) -> None:
        first, last = start.layers
        total = sum(folder.tensors[name].nbytes for name in folder.stage_tensors(first, last))
        tell(total * layers // (last - first), total)

    return Stage.load(
        folder,
        start.layers,
        start.device,
        start.dtype,
        quantize=start.quantize,
        held=held,
        avoid=avoid,
        on_layer=on_layer,
    )


def _load_draft(start: Start) -> DraftEngine | None:
    """The draft model of ``start``; without it there are only drafts that cost no model."""
    draft = start.draft
    if draft is None:
        return None
    try:
        folder = ModelFolder.open(Path(draft.model_dir))
        layers = (0, folder.config.layers)
        stage = Stage.load(folder, layers, start.device, start.dtype, avoid=start.avoid)
        profile = _profile(stage, start, draft.kv_bytes)
    except (MolinkError, MemoryError, RuntimeError) as error:
        log.warning("no draft model: %s", error)
        return None
    size = start.block_size
    blocks = max(1, draft.kv_bytes // stage.block_bytes(size))
    vocabulary = ModelFolder.open(Path(start.model_dir), start.layers).config.vocab_size
    log.info("a draft model of %d layers, %d blocks", folder.config.layers, blocks)
    make = partial(Drafter, stage, blocks, size, vocabulary)
    facts = DraftModelFacts(profile, min(folder.config.context, blocks * size))
    return DraftEngine(facts, partial(DraftThread, make))


def _prove(start: Start, config: ModelConfig) -> tuple[str, ...]:
    """Kernels to avoid, now that those which the stage would use were tried."""
    began = time.perf_counter()
    avoid = prove(
        Path(start.proofs),
        config,
        find_device(start.device),
        start.dtype,
        start.quantize,
        start.block_size,
        start.avoid,
    )
    log.info("kernels were looked at in %.2f s", time.perf_counter() - began)
    return avoid


def _profile(stage: Stage, start: Start, kv_bytes: int) -> Profile:
    cache = Path(start.profile_cache) if start.profile_cache else None
    return profile_stage(stage, kv_bytes, start.block_size, cache, hurry=start.hurry)
