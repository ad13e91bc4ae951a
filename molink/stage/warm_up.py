"""Warms up a process before its first stage is loaded."""

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.dtypes import DTypeChoice
from molink.facts.model import KVCacheDType, LayerRange, Quantize
from molink.stage.diagnostics.stage_passes import StagePasses
from molink.stage.stage import Stage

#: Rows of the prefill pass.
_PROMPT_ROWS = 8


def warm_up(
    folder: ModelFolder,
    layers: LayerRange,
    dtype: DTypeChoice,
    quantize: Quantize,
    kv_cache_dtype: KVCacheDType,
    block_size: int,
) -> None:
    """Load one inner layer of ``layers`` on the CPU, run a few passes and free it.

    Without an inner layer nothing happens, since the model's ends may be large.

    Raises:
        MolinkError: as :meth:`Stage.load_layers`.
    """
    inner = [layer for layer in range(*layers) if 0 < layer < folder.config.layers - 1]
    if not inner:
        return
    one = inner[0], inner[0] + 1
    stage = Stage.load_layers(folder, one, "cpu", dtype, quantize, kv_cache_dtype=kv_cache_dtype)
    with StagePasses(stage, stage.block_bytes(block_size), block_size) as passes:
        passes.run_prefill(min(_PROMPT_ROWS, folder.config.max_model_len), 0)
        passes.run_decode(1, 1)
