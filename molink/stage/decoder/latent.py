"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1), attended in latent space.

A head's key is a matrix times a row's latents. So its score with a query equals the score of the
latents with the query times that matrix, transposed (the paper's "absorption"). The KV cache holds
the latents and one rotated key for all heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.tensor_layout import (
    KEY_NAME,
    KEY_NORM_NAME,
    KEY_VALUE_NAME,
    QUERY_NAME,
    QUERY_NORM_NAME,
    VALUE_NAME,
    attention_output,
    latent_projections,
)
from molink.checkpoint.traits import LatentShape
from molink.stage.decoder.norm import Float32RmsNorm
from molink.stage.linear import Projection
from molink.stage.weights.weight_reader import WeightReader

#: Epsilon of the latents' norms; the config's epsilon applies to the other norms only.
_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Projects rows to heads ``[T, (heads + 2) * head_dim]``: queries, a key, a value.

    Each head begins with the rotated numbers (zeros in the value) and ends with latents. ``down``
    projects to queries or their latents, and to the key's latents and rotated numbers. ``query_up``
    projects query latents to queries. ``key_up`` is ``[heads, plain_dim, rank]``.
    """

    shape: LatentShape
    down: Projection
    query_norm: Float32RmsNorm | None
    query_up: Projection | None
    key_norm: Float32RmsNorm
    key_up: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        return self.expand_heads(*self.project_latents(rows)).flatten(1)

    def project_latents(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Project rows to queries (or their normed latents), key latents and the rotated key."""
        both, size = self.down(rows), self.shape.rank + self.shape.rope_dim
        first, second = both[:, :-size], both[:, -size:]
        return (first if self.query_norm is None else self.query_norm(first)), second

    def expand_heads(self, first: Tensor, second: Tensor) -> Tensor:
        """Build heads ``[T, heads + 2, head_dim]`` from the results of :meth:`project_latents`."""
        shape, (heads, _, rank) = self.shape, self.key_up.shape
        latents, turned = second[:, :rank], second[:, rank:]
        if self.query_up is not None:
            first = self.query_up(first)
        queries = first.reshape(len(first), heads, -1)
        made = first.new_zeros(len(first), heads + 2, shape.head_dim)
        made[:, :heads, : shape.rope_dim] = queries[..., shape.plain_dim :]
        plain = queries[..., : shape.plain_dim].transpose(0, 1)
        made[:, :heads, -rank:] = torch.bmm(plain, self.key_up).transpose(0, 1)
        made[:, heads, : shape.rope_dim] = turned
        made[:, heads:, -rank:] = self.key_norm(latents).unsqueeze(1)
        return made

    @property
    def nbytes(self) -> int:
        parts = (self.down, self.query_norm, self.query_up, self.key_norm, self.key_up)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class LatentOutput:
    """Projects attention outputs ``[T, heads * head_dim]`` to values, and these to rows.

    ``value_up`` is ``[heads, rank, value_dim]``.
    """

    value_up: Tensor
    output: Projection

    def __call__(self, rows: Tensor) -> Tensor:
        heads, rank, _ = self.value_up.shape
        latents = rows.view(len(rows), heads, -1)[..., -rank:].transpose(0, 1)
        return self.output(torch.bmm(latents, self.value_up).transpose(0, 1).flatten(1))

    @property
    def nbytes(self) -> int:
        return self.value_up.nbytes + self.output.nbytes


def load_latent_attention(
    reader: WeightReader, config: ModelConfig, shape: LatentShape, prefix: str
) -> tuple[LatentHeads, LatentOutput]:
    """Load a layer's projections; ``prefix`` begins the names of its tensors."""

    def norm(name: str) -> Float32RmsNorm:
        weight = reader.read_tensors(f"{prefix}{name}.weight", dtype=torch.float32)
        return Float32RmsNorm(weight, _NORM_EPS, reader.dtype)

    if shape.is_split:
        keys, values = (
            reader.read_tensors(f"{prefix}{name}.weight") for name in (KEY_NAME, VALUE_NAME)
        )
        key_up = keys.view(config.heads, shape.rank, -1).transpose(1, 2)
        value_up = values.view(config.heads, -1, shape.rank)
    else:
        both = reader.read_tensors(f"{prefix}{KEY_VALUE_NAME}.weight")
        of_heads = both.view(config.heads, -1, shape.rank)
        key_up, value_up = of_heads[:, : shape.plain_dim], of_heads[:, shape.plain_dim :]
    has_latent_query = bool(shape.query_rank)
    heads = LatentHeads(
        shape=shape,
        down=reader.load_projection(
            [prefix + name for name in latent_projections(shape)], config.attention_bias
        ),
        query_norm=norm(QUERY_NORM_NAME) if has_latent_query else None,
        query_up=reader.load_projection([prefix + QUERY_NAME], False) if has_latent_query else None,
        key_norm=norm(KEY_NORM_NAME),
        key_up=key_up.contiguous(),
    )
    output = reader.load_projection([prefix + attention_output(config)], config.output_bias)
    return heads, LatentOutput(value_up.transpose(1, 2).contiguous(), output)
