"""Loads a stage on torch and profiles it."""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

from molink.checkpoint.model_folder import ModelFolder
from molink.errors import KernelsFailed, MolinkError, UsageError
from molink.facts.drafts import DraftModelFacts
from molink.facts.dtypes import DTypeChoice
from molink.facts.layer_range import format_ranges
from molink.facts.model import Quantize
from molink.facts.profile import Profile
from molink.stage.decoder.decoder import HeldWeights
from molink.stage.diagnostics.kernel_checks import check_kernels
from molink.stage.diagnostics.stage_profile import profile_stage
from molink.stage.diagnostics.trial_shapes import find_planes
from molink.stage.linear.planes_check import check_all_planes
from molink.stage.out_of_memory import empty_device_cache, limit_memory
from molink.stage.stage import Stage, find_device
from molink.stage.torch_dtypes import TORCH_DTYPES, choose_dtype
from molink.text.grammar_matcher import GrammarCompiler
from molink.wire.messages.worker_pipe import LoadStage
from molinkd.worker.draft_proposer import DraftModelThread, DraftProposer
from molinkd.worker.engine import DraftEngine, StageEngine
from molinkd.worker.executor import StageExecutor
from molinkd.worker.image_encoder import ImageEncoder

log = logging.getLogger(__name__)


#: Called with bytes of weights loaded so far, and in total.
OnWeightProgress = Callable[[int, int], None]


def load_engine(start: LoadStage, on_progress: OnWeightProgress = lambda *_: None) -> StageEngine:
    """Load and profile the stage that ``start`` describes.

    Raises:
        MolinkError: loading failed.
    """
    return _build_engine(
        start, on_progress, _load_stage(start, on_progress), _load_draft_model(start)
    )


def _reload_engine(
    old: Stage,
    draft: DraftEngine | None,
    before: LoadStage,
    on_progress: OnWeightProgress,
    start: LoadStage,
) -> StageEngine:
    """Replace the stage ``old``, loaded by ``before``, with the one of ``start``."""
    held = old.release_weights(start.layers)
    if before.draft != start.draft:
        draft = None
    if _weights_key(before) != _weights_key(start):
        held = HeldWeights()
    empty_device_cache()
    reused = format_ranges((layer, layer + 1) for layer in sorted(held.blocks))
    log.info("reusing loaded layers %s", reused or "none")
    stage = _load_stage(start, on_progress, held)
    return _build_engine(start, on_progress, stage, draft or _load_draft_model(start))


def _weights_key(start: LoadStage) -> tuple[object, ...]:
    """Values that must be equal for two stages' layers to be identical in memory."""
    return (
        start.model_dir,
        start.dtype,
        start.device,
        start.quantize,
        start.disabled_kernels,
        start.host_experts,
    )


def _build_engine(
    start: LoadStage, on_progress: OnWeightProgress, stage: Stage, draft: DraftEngine | None
) -> StageEngine:
    began = time.perf_counter()
    profile = _profile_stage(stage, start, start.kv_bytes)
    return StageEngine(
        stage,
        profile,
        partial(StageExecutor, stage),
        partial(_reload_engine, stage, draft, start, on_progress),
        grammars=_create_grammar_compiler(stage, start),
        draft=draft,
        images=ImageEncoder(stage) if stage.is_first and stage.config.vision else None,
        profile_s=time.perf_counter() - began,
    )


def _create_grammar_compiler(stage: Stage, start: LoadStage) -> GrammarCompiler | None:
    if not (stage.is_last and stage.config.has_output_head):
        return None
    return GrammarCompiler(Path(start.model_dir), stage.config.vocab_size)


def _load_stage(
    start: LoadStage, on_progress: OnWeightProgress, held: HeldWeights | None = None
) -> Stage:
    folder = ModelFolder.open(Path(start.model_dir), start.layers)
    if start.max_model_len > folder.config.max_model_len:
        raise UsageError(
            f"a context of {start.max_model_len} tokens is more than the model's "
            f"{folder.config.max_model_len}"
        )
    if not start.settings.num_speculative_tokens:
        folder = replace(folder, config=replace(folder.config, mtp=None))
    limit_memory(start.device, start.memory_limit)
    disabled_kernels = _check_kernels(start, folder, start.quantize)
    _require_planes(start, folder, disabled_kernels)

    def on_layer(layers: int) -> None:
        first, last = start.layers
        total = sum(folder.tensors[name].nbytes for name in folder.stage_tensors(first, last))
        on_progress(total * layers // (last - first), total)

    stage = Stage.load_layers(
        folder,
        start.layers,
        start.device,
        start.dtype,
        quantize=start.quantize,
        held=held,
        disabled_kernels=disabled_kernels,
        on_layer=on_layer,
        max_decode_rows=start.settings.max_num_seqs,
        kv_cache_dtype=start.kv_cache_dtype,
        host_experts=start.host_experts,
        host_disabled_kernels=_check_host_kernels(start, folder),
    )
    _require_paging(start, stage)
    return stage


def _load_draft_model(start: LoadStage) -> DraftEngine | None:
    """Load the draft model of ``start``; on failure, only model-free drafts are used."""
    draft = start.draft
    if draft is None:
        return None
    try:
        folder = ModelFolder.open(Path(draft.model_dir))
        layers, disabled_kernels = (0, folder.config.layers), _check_kernels(start, folder)
        _require_planes(start, folder, disabled_kernels)
        stage = Stage.load_layers(
            folder, layers, start.device, start.dtype, disabled_kernels=disabled_kernels
        )
        _require_paging(start, stage)
        profile = _profile_stage(stage, start, draft.kv_bytes)
    except (MolinkError, MemoryError, RuntimeError) as error:
        log.warning("no draft model: %s", error)
        return None
    size = start.block_size
    blocks = max(1, draft.kv_bytes // stage.block_bytes(size))
    vocab_size = ModelFolder.open(Path(start.model_dir), start.layers).config.vocab_size
    log.info("draft model: %d layers, %d blocks", folder.config.layers, blocks)
    make = partial(DraftProposer, stage, blocks, size, vocab_size)
    facts = DraftModelFacts(profile, min(folder.config.max_model_len, blocks * size))
    return DraftEngine(facts, partial(DraftModelThread, make))


def _check_kernels(
    start: LoadStage, folder: ModelFolder, quantize: Quantize = "none"
) -> tuple[str, ...]:
    """Test the kernels for a model; return those to avoid."""
    return _check_on(start, folder, start.device, start.dtype, quantize, start.disabled_kernels)


def _check_host_kernels(start: LoadStage, folder: ModelFolder) -> tuple[str, ...]:
    """Test the CPU's kernels for experts in the memory beside a GPU; return those to avoid."""
    if start.device == "cpu" or not start.host_experts:
        return start.disabled_kernels
    dtype: DTypeChoice = "f32" if start.dtype == "f32" else "auto"
    return _check_on(start, folder, "cpu", dtype, start.quantize, ())


def _check_on(
    start: LoadStage,
    folder: ModelFolder,
    device: str,
    dtype: DTypeChoice,
    quantize: Quantize,
    disabled: tuple[str, ...],
) -> tuple[str, ...]:
    if not start.kernel_checks_path:
        return disabled
    began = time.perf_counter()
    path, size = Path(start.kernel_checks_path), start.block_size
    found = check_kernels(path, folder, find_device(device), dtype, quantize, size, disabled)
    log.info("kernels of %s checked in %.2f s", device, time.perf_counter() - began)
    return found


def _require_planes(start: LoadStage, folder: ModelFolder, disabled: Collection[str]) -> None:
    """Fail if weights that were planned as low-bit would be dequantized.

    Raises:
        KernelsFailed: they would.
    """
    if "gguf-blocks" not in start.required_kernels:
        return
    device, works = find_device(start.device), "gguf-blocks" not in disabled
    if device.type == "cuda" and works:
        dtype = TORCH_DTYPES[choose_dtype(start.dtype, folder.config.dtype, device)]
        planes = find_planes(folder.config, folder.tensors)
        # Loading does the same for each weight; the results are kept.
        works = check_all_planes(planes, dtype, device)
    if not works:
        raise KernelsFailed(("gguf-blocks",))


def _require_paging(start: LoadStage, stage: Stage) -> None:
    """Fail if attention would copy KV, although no memory was planned for that.

    Raises:
        KernelsFailed: it would.
    """
    if "triton-attention" in start.required_kernels and not stage.reads_pages(start.block_size):
        raise KernelsFailed(("triton-attention",))


def _profile_stage(stage: Stage, start: LoadStage, kv_bytes: int) -> Profile:
    cache = Path(start.profile_cache) if start.profile_cache else None
    return profile_stage(stage, kv_bytes, start.block_size, cache, hurry=start.skip_optional)
