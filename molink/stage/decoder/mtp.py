"""Multi-token prediction: a layer that predicts the token after the next.

See DeepSeek-V3 (arXiv 2412.19437, §2.2). A row and the embedding of the token after it are
projected to the input of one more layer; the model's output head predicts the following token from
its output. Further tokens are predicted from the layer's own rows and tokens. As in SGLang and
vLLM, the first input is a row after the model's last norm.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.traits import MtpShape
from molink.stage.decoder.block import DecoderBlock, load_block, load_norm, run_blocks
from molink.stage.decoder.mixer import ForwardContext
from molink.stage.decoder.norm import Norm
from molink.stage.decoder.operators import RowOperators
from molink.stage.linear import EmbeddingTable, Projection
from molink.stage.torch_dtypes import residual_dtype
from molink.stage.weights.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class MtpModule:
    """Weights of a module for multi-token prediction; ``embedding`` and output head are shared.

    Its projection reads ``[row, embedding]`` if ``row_first``.
    """

    embedding: EmbeddingTable
    embedding_scale: float
    token_norm: Norm
    row_norm: Norm
    projection: Projection
    block: DecoderBlock
    output_norm: Norm
    row_first: bool

    def __call__(self, normed: Tensor, tokens: Tensor, context: ForwardContext) -> Tensor:
        """Compute rows ``[T, hidden]`` for the output head.

        The input is such rows and the ``tokens`` (int64 ``[T]``) that follow them.
        """
        wide = residual_dtype(normed.dtype)
        embedded = self.embedding.look_up(tokens).to(wide)
        if self.embedding_scale != 1.0:
            embedded = embedded * self.embedding_scale
        both = [self.token_norm(embedded), self.row_norm(normed.to(wide))]
        rows = self.projection(torch.cat(both[::-1] if self.row_first else both, dim=1))
        return self.output_norm(run_blocks((self.block,), rows.to(wide), context))

    @property
    def nbytes(self) -> int:
        """Bytes of memory besides the embedding."""
        norms = (self.token_norm, self.row_norm, self.output_norm)
        return sum(part.nbytes for part in (*norms, self.projection, self.block))

    def with_index(self, index: int, embedding: EmbeddingTable) -> "MtpModule":
        """Return the same weights for layer ``index`` of the KV pool, with a shared embedding."""
        block = replace(self.block, mixer=self.block.mixer.with_index(index))
        return replace(self, block=block, embedding=embedding)


def load_mtp(
    reader: WeightReader,
    config: ModelConfig,
    mtp: MtpShape,
    operators: RowOperators,
    embedding: EmbeddingTable,
    index: int,
) -> MtpModule:
    """Load a module whose layer has index ``index`` in the stage's KV pool."""
    token_norm, row_norm, output_norm = (
        load_norm(reader, config, operators, name) for name in mtp.norm_names
    )
    return MtpModule(
        embedding,
        float(torch.tensor(config.embedding_scale, dtype=reader.dtype)),
        token_norm,
        row_norm,
        reader.load_projection([mtp.projection_name], False),
        load_block(reader, config, operators, config.layers, index),
        output_norm,
        mtp.row_first,
    )
