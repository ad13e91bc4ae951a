"""Runs a stage's layers and ends of the model, with the KV pool, attention and RoPE of a step."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.errors import InvariantError
from molink.stage.attention.base import AttentionBackend
from molink.stage.batch import ImageRows, MtpInput, MtpOutput, SequenceRows, StageInput, StageOutput
from molink.stage.decoder.block import AddedRows
from molink.stage.decoder.decoder import Decoder
from molink.stage.decoder.mixer import ForwardContext, StateContext
from molink.stage.decoder.query_scale import QueryScales
from molink.stage.decoder.rotary import Rope
from molink.stage.device_copy import upload_integers, upload_tensor
from molink.stage.linear import group_by_adapter
from molink.stage.mixed_kv_pool import AnyKVPool
from molink.stage.state_pool import StatePool
from molink.stage.torch_dtypes import residual_dtype


@dataclass(frozen=True, slots=True)
class LocatedRows:
    """A step, with its rows' positions and slots on the host.

    See :meth:`~molink.stage.kv_pool.KVPool.locate_rows`.
    """

    batch: StageInput
    positions: "array[int]"
    slots: "array[int]"

    def __len__(self) -> int:
        return len(self.positions)


def create_ropes(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Rope | QueryScales, ...]:
    """Create a model's ropes, then the index queries' rope and the queries' factors, if any."""
    kinds = [
        (rope, size, config.interleaved_rope)
        for rope, size in zip(config.rope_configs, config.rope_head_dims, strict=True)
    ]
    if config.latent is not None and config.latent.index is not None:
        kinds.append((config.rope, config.head_dim, config.latent.index.interleaved))
    cell = 0 if config.vision is None else config.vision.cell_pixels
    ropes = tuple(
        Rope(rope, size, dtype, device, interleaved, cell) for rope, size, interleaved in kinds
    )
    scaling = config.query_scaling
    return ropes if scaling is None else (*ropes, QueryScales(scaling, dtype, device))


@dataclass(frozen=True, slots=True)
class LayerPass:
    """Runs steps eagerly on one KV pool.

    Layers compute in ``dtype``. ``states`` belongs to recurrent layers.
    """

    decoder: Decoder
    pool: AnyKVPool
    attention: AttentionBackend
    ropes: tuple[Rope | QueryScales, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    device: torch.device
    states: StatePool | None = None

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds tokens."""
        return self.decoder.embedding is not None

    @property
    def is_last(self) -> bool:
        """Whether the stage returns logits, or an embedding model's normed rows."""
        return self.decoder.norm is not None

    @property
    def has_mtp(self) -> bool:
        """Whether the stage has an MTP layer."""
        return self.decoder.mtp is not None

    def run_step(
        self, step: LocatedRows, between_layers: Callable[[], None] | None = None
    ) -> StageOutput:
        """Compute rows ``[T, hidden]`` in ``wire_dtype``, or the last stage's results.

        ``between_layers`` is called as in :func:`.run_blocks`.
        """
        batch = step.batch
        context = self._prepare_context(batch.sequences, step.positions, step.slots)
        if self.states is not None:
            states = StateContext(self.states, self.states.locate_rows(batch.sequences))
            context = replace(context, states=states)
        context = replace(context, adapters=group_by_adapter(batch.sequences, self.device))
        rows, added = self.embed_batch(batch), None
        if batch.image_rows is not None:
            added = self._place_images(rows, batch.image_rows)
        rows = self.decoder.run_layers(rows, context, between_layers, added)
        return self.finish_rows(rows, batch.logit_rows)

    def run_mtp(self, batch: MtpInput, positions: "array[int]", slots: "array[int]") -> MtpOutput:
        """Predict tokens after rows at ``positions``, and store their KV in ``slots``.

        Adapters don't change the MTP layer.
        """
        if self.decoder.mtp is None:
            raise InvariantError("this stage has no MTP layer")
        context = self._prepare_context(batch.sequences, positions, slots)
        tokens = upload_integers(batch.tokens, self.device)
        normed = self.decoder.mtp(batch.normed, tokens, context)
        normed = _select_rows(normed, batch.logit_rows)
        return MtpOutput(normed, self.decoder.compute_logits(normed))

    def _prepare_context(
        self, sequences: Sequence[SequenceRows], positions: "array[int]", slots: "array[int]"
    ) -> ForwardContext:
        """Prepare the inputs that all layers of a forward share."""
        both = upload_integers(positions + slots, self.device)
        count = len(positions)
        angles = tuple(rope.compute_angles(both[:count], sequences) for rope in self.ropes)
        attention = self.attention.prepare_layers(
            sequences, self.pool.block_size, self.dtype, self.device
        )
        return ForwardContext(self.pool, both[count:], angles, attention)

    def embed_batch(self, batch: StageInput) -> Tensor:
        """Return the residual rows ``[T, hidden]`` of a step, on the device, without image rows."""
        if batch.tokens is not None and self.is_first:
            return self.embed_tokens(upload_tensor(batch.tokens, self.device))
        if batch.hidden is None:
            raise InvariantError("a stage got neither tokens nor hidden rows")
        return self.widen_rows(upload_tensor(batch.hidden, self.device))

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embed token ids (int64 ``[T]``, on the device) to residual rows."""
        return self.widen_rows(self.decoder.embed_tokens(tokens))

    def widen_rows(self, rows: Tensor) -> Tensor:
        """Convert rows ``[T, hidden]`` to the type of residual sums."""
        return rows.to(residual_dtype(self.dtype))

    def _place_images(self, rows: Tensor, images: ImageRows) -> AddedRows:
        """Write the image rows into ``rows``; return the rows to add after the first layers."""
        indices = upload_integers(images.indices, self.device)
        found = upload_tensor(images.rows, self.device).to(rows.dtype)
        embedded, *later = found.view(len(found), -1, rows.shape[1]).unbind(1)
        rows[indices] = embedded
        return AddedRows(indices, later)

    def finish_rows(self, rows: Tensor, logit_rows: Sequence[int]) -> StageOutput:
        """Compute the stage's result from residual rows ``[T, hidden]``."""
        if not self.is_last:
            return StageOutput(rows.to(self.wire_dtype))
        if not self.has_mtp:
            chosen = self.decoder.normalize_rows(_select_rows(rows, logit_rows))
            return StageOutput(self.decoder.compute_logits(chosen))
        normed = self.decoder.normalize_rows(rows)
        logits = self.decoder.compute_logits(_select_rows(normed, logit_rows))
        return StageOutput(logits, normed=normed)


def _select_rows(rows: Tensor, wanted: Sequence[int]) -> Tensor:
    """Select the rows ``wanted`` of ``[T, hidden]``."""
    if tuple(wanted) == tuple(range(len(rows))):
        return rows
    return rows.index_select(0, upload_integers(wanted, rows.device))
