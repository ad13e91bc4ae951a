"""The part of a decoder that a stage holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.tensor_layout import EMBEDDING_NAME, FINAL_NORM_NAME, OUTPUT_HEAD_NAME
from molink.errors import InvariantError
from molink.stage.decoder.block import (
    AddedRows,
    DecoderBlock,
    HostExperts,
    load_block,
    load_norm,
    run_blocks,
)
from molink.stage.decoder.mixer import ForwardContext
from molink.stage.decoder.mtp import MtpModule, load_mtp
from molink.stage.decoder.norm import Norm
from molink.stage.decoder.operators import RowOperators
from molink.stage.decoder.split_experts import SplitExpertMlp
from molink.stage.linear import EmbeddingTable, Projection
from molink.stage.vision.tower import VisionTower, load_tower
from molink.stage.weights.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class Decoder:
    """Layers of a stage, and its ends of the model.

    ``embedding_scale`` is rounded to the compute type, as in training. An embedding model has no
    ``output_head``.
    """

    config: ModelConfig
    embedding: EmbeddingTable | None
    blocks: tuple[DecoderBlock, ...]
    norm: Norm | None
    output_head: Projection | None
    embedding_scale: float = 1.0
    vision: VisionTower | None = None
    #: The MTP layer, at the last stage of some models.
    mtp: MtpModule | None = None

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture the layers."""
        return all(block.capturable for block in self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of memory; tied embeddings count once."""
        table = None if self.mtp is None else self.mtp.embedding
        every = (self.embedding, table, self.norm, self.output_head, self.vision)
        ends: dict[int, Norm | EmbeddingTable | Projection | VisionTower | None] = {
            id(part): part for part in every
        }
        parts = (*ends.values(), *self.blocks, self.mtp)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def host_nbytes(self) -> int:
        """Bytes of experts in host memory."""
        return sum(one.host_nbytes for one in self.split_experts)

    @property
    def split_experts(self) -> tuple[SplitExpertMlp, ...]:
        """Each layer's experts, if some of them are in host memory."""
        return tuple(one for block in self.blocks if (one := block.split_experts) is not None)

    @property
    def step_bytes(self) -> int:
        """Bytes of weights read per step, without the embedding."""
        parts = (self.norm, self.output_head, *self.blocks, self.mtp)
        return sum(part.nbytes for part in parts if part is not None)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embed token ids (int64 ``[T]``, on the device) to rows ``[T, hidden]``."""
        if self.embedding is None:
            raise InvariantError("a stage without the embedding got tokens")
        rows = self.embedding.look_up(tokens)
        return rows if self.embedding_scale == 1.0 else rows.mul_(self.embedding_scale)

    def run_layers(
        self,
        rows: Tensor,
        context: ForwardContext,
        between_layers: Callable[[], None] | None = None,
        added: AddedRows | None = None,
    ) -> Tensor:
        """Run rows ``[T, hidden]`` through all layers (see :func:`.run_blocks`)."""
        return run_blocks(self.blocks, rows, context, between_layers, added)

    def normalize_rows(self, rows: Tensor) -> Tensor:
        """Apply the model's last norm to rows ``[T, hidden]``."""
        if self.norm is None:
            raise InvariantError("a stage without the final norm can't compute logits")
        return self.norm(rows)

    def compute_logits(self, normed: Tensor) -> Tensor:
        """Compute float32 logits ``[T, vocab_size]`` of normed rows ``[T, hidden]``.

        Without an output head, return the rows in float32.
        """
        head, config = self.output_head, self.config
        if not len(normed):
            width = config.hidden_size if head is None else config.vocab_size
            return normed.new_empty(0, width, dtype=torch.float32)
        if head is None:
            return normed.float()
        logits = head(normed).float()
        cap, scale = config.final_softcap, config.logit_scale
        if scale != 1.0:
            logits = logits.mul_(scale)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Loaded weights that another stage can reuse: layers by index, and ends of the model."""

    blocks: Mapping[int, DecoderBlock] = field(default_factory=dict)
    embedding: EmbeddingTable | None = None
    norm: Norm | None = None
    output_head: Projection | None = None
    vision: VisionTower | None = None
    mtp: MtpModule | None = None

    @classmethod
    def from_decoder(
        cls, decoder: Decoder, layers: tuple[int, int], wanted: tuple[int, int]
    ) -> "HeldWeights":
        """Select the weights of a stage of ``layers`` that a stage of ``wanted`` can reuse."""
        blocks = {
            layer: block
            for layer, block in zip(range(*layers), decoder.blocks, strict=True)
            if wanted[0] <= layer < wanted[1]
        }
        last = decoder.config.layers
        ends = [(first == 0, stop == last) for first, stop in (layers, wanted)]
        # Tied ends share a weight; a stage with only one end stores it differently.
        apart = decoder.config.tied_embeddings and (all(ends[0]) != all(ends[1]))
        opens = ends[0][0] and ends[1][0] and not apart
        closes = ends[0][1] and ends[1][1] and not apart
        return cls(
            blocks,
            decoder.embedding if opens else None,
            decoder.norm if closes else None,
            decoder.output_head if closes else None,
            decoder.vision if ends[0][0] and ends[1][0] else None,
            decoder.mtp if closes else None,
        )


_NO_WEIGHTS = HeldWeights()


def load_decoder(
    reader: WeightReader,
    config: ModelConfig,
    operators: RowOperators,
    layers: tuple[int, int],
    held: HeldWeights = _NO_WEIGHTS,
    on_layer: Callable[[int], None] = lambda _: None,
    host: HostExperts | None = None,
) -> Decoder:
    """Load layers ``first:last`` and the ends of the model that the range touches.

    Weights in ``held`` are reused; ``on_layer`` is called with the number of loaded layers.
    """
    first, last = layers
    opens, closes = first == 0, last == config.layers
    scale = float(torch.tensor(config.embedding_scale, dtype=reader.dtype)) if opens else 1.0
    blocks = []
    for layer in range(first, last):
        on_layer(layer - first)
        # Layers with attention and recurrent layers are numbered in separate pools.
        is_recurrent = layer in config.recurrent_layers
        count = config.count_recurrent if is_recurrent else config.count_attention
        index = count((first, layer))
        known = held.blocks.get(layer)
        if known is None:
            blocks.append(load_block(reader, config, operators, layer, index, host))
        else:
            blocks.append(replace(known, mixer=known.mixer.with_index(index)))
    on_layer(len(blocks))
    norm, embedding, head, vision = held.norm, held.embedding, held.output_head, held.vision
    if opens and config.vision is not None and vision is None:
        vision = load_tower(reader, config.vision)
    if closes and norm is None:
        norm = load_norm(reader, config, operators, FINAL_NORM_NAME)
    mtp_shape = config.mtp if closes else None
    if embedding is None and held.mtp is not None:
        embedding = held.mtp.embedding
    embeds = opens or mtp_shape is not None
    if embeds and closes and config.tied_embeddings and embedding is None:
        embedding = head = reader.load_tied_embedding(EMBEDDING_NAME)
    if embeds and embedding is None:
        embedding = reader.load_embedding(EMBEDDING_NAME)
    if closes and head is None and config.has_output_head:
        name = EMBEDDING_NAME if config.tied_embeddings else OUTPUT_HEAD_NAME
        head = reader.load_projection([name.removesuffix(".weight")], config.head_bias)
    mtp, index = None, config.count_attention(layers)
    if mtp_shape is not None and embedding is not None:
        mtp = held.mtp or load_mtp(reader, config, mtp_shape, operators, embedding, index)
        mtp = mtp.with_index(index, embedding)
    first_table = embedding if opens else None
    return Decoder(config, first_table, tuple(blocks), norm, head, scale, vision, mtp)
