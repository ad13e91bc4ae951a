"""Latent attention to selected positions (DeepSeek-V3.2, arXiv 2512.02556, §2.1).

A position's index key is stored in its KV cache entry, between the rotated numbers and the latents;
attention's own queries have zeros there.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.tensor_layout import (
    INDEX_KEY_NAME,
    INDEX_NORM_NAME,
    INDEX_QUERY_NAME,
    INDEX_WEIGHT_NAME,
)
from molink.checkpoint.traits import IndexShape, LatentShape
from molink.stage.attention.token_choice import TokenChoice
from molink.stage.decoder.append_heads import AppendHeads
from molink.stage.decoder.latent import LatentHeads, LatentOutput, load_latent_attention
from molink.stage.decoder.mixer import ForwardContext
from molink.stage.decoder.rotary import rotate_half, rotate_pairs
from molink.stage.linear import PlainLinear, Projection
from molink.stage.weights.weight_reader import WeightReader

#: Epsilon of the index keys' norm.
_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """The indexer: makes index keys and queries; ``weigh`` projects rows to the queries' weights.

    ``norm_weight`` and ``norm_bias`` are float32 ``[dim]``.
    """

    shape: IndexShape
    query: Projection
    key: Projection
    norm_weight: Tensor
    norm_bias: Tensor
    weigh: PlainLinear

    def make_keys(self, rows: Tensor, angles: Tensor) -> Tensor:
        """Return index keys ``[T, dim]`` of rows ``[T, hidden]``."""
        keys = self.key(rows).float()
        keys = layer_norm(keys, keys.shape[1:], self.norm_weight, self.norm_bias, _NORM_EPS)
        return self._rotate(keys.to(rows.dtype).unsqueeze(1), angles).squeeze(1)

    def choose(
        self, rows: Tensor, query_latents: Tensor, angles: Tensor, part: slice
    ) -> TokenChoice:
        """Return index queries and weights by which rows ``[T, hidden]`` select positions.

        ``part`` locates the index key within a cached key.
        """
        shape = self.shape
        queries = self.query(query_latents).view(len(rows), shape.heads, shape.dim)
        weights = self.weigh(rows).float() * (shape.dim * shape.heads) ** -0.5
        return TokenChoice(self._rotate(queries, angles), weights, part, shape.top_k)

    def _rotate(self, heads: Tensor, angles: Tensor) -> Tensor:
        rotate = rotate_pairs if self.shape.interleaved else rotate_half
        rotate(heads, angles)
        return heads

    @property
    def nbytes(self) -> int:
        parts = (self.query, self.key, self.norm_weight, self.norm_bias, self.weigh)
        return sum(part.nbytes for part in parts)


@dataclass(frozen=True, slots=True)
class SparseLatentAttention:
    """Weights of a layer's attention.

    ``rope`` is the index in ``angles`` of the queries' and keys' rotation; the rotation of index
    queries and keys is the next one.
    """

    capturable: ClassVar[bool] = True

    index: int
    rope: int
    heads: LatentHeads
    tokens: TokenIndex
    output: LatentOutput
    append_heads: AppendHeads

    def __call__(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """See :class:`~molink.stage.decoder.mixer.Mixer`."""
        shape, index_angles = self.heads.shape, context.angles[self.rope + 1]
        part = slice(shape.rope_dim, shape.head_dim - shape.rank)
        query_latents, key_latents = self.heads.project_latents(normed)
        made = self.heads.expand_heads(query_latents, key_latents)
        made[:, -2, part] = self.tokens.make_keys(normed, index_angles)
        pool, index = context.pool.locate_layer(self.index)
        angles = context.angles[self.rope]
        made = self.append_heads(made, None, angles, pool, index, context.slots)
        choice = self.tokens.choose(normed, query_latents, index_angles, part)
        attended = context.require_choosing().attend_chosen(self.index, made, pool, choice)
        return self.output(attended)

    @property
    def nbytes(self) -> int:
        return self.heads.nbytes + self.tokens.nbytes + self.output.nbytes

    def with_index(self, index: int) -> "SparseLatentAttention":
        """See :class:`~molink.stage.decoder.mixer.Mixer`."""
        return replace(self, index=index)


def load_sparse_attention(
    reader: WeightReader,
    config: ModelConfig,
    shape: LatentShape,
    append_heads: AppendHeads,
    layer: int,
    index: int,
) -> SparseLatentAttention:
    """Load attention of the model's layer ``layer``, which has index ``index`` in the KV pool."""
    prefix, rope = f"model.layers.{layer}.", config.rope_index(layer)
    assert shape.index is not None
    assert rope is not None, "latent attention has RoPE"
    heads, output = load_latent_attention(reader, config, shape, prefix)
    tokens = TokenIndex(
        shape=shape.index,
        query=reader.load_projection([prefix + INDEX_QUERY_NAME], False),
        key=reader.load_projection([prefix + INDEX_KEY_NAME], False),
        norm_weight=reader.read_tensors(f"{prefix}{INDEX_NORM_NAME}.weight", dtype=torch.float32),
        norm_bias=reader.read_tensors(f"{prefix}{INDEX_NORM_NAME}.bias", dtype=torch.float32),
        # Never quantized: small errors would change the selected positions.
        weigh=PlainLinear(reader.read_tensors(f"{prefix}{INDEX_WEIGHT_NAME}.weight")),
    )
    return SparseLatentAttention(index, rope, heads, tokens, output, append_heads)
