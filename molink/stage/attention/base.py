"""What an attention backend has to do, and the metadata that all layers of a forward share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.stage.batch import SequenceRows
from molink.stage.kv_pool import KVPool

BackendName = Literal["auto", "flash", "compiled", "gather", "plain"]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend has to know of the model. ``groups`` is query heads per key-value head.

    Scores are ``scale * q·k``. ``windows`` has an entry for each layer of the stage: how many
    positions a row attends to, its own included; 0 = all before it. A ``softcap`` above 0 bounds
    scores to ``softcap * tanh(score / softcap)`` (Gemma 2). With ``sinks`` each layer brings a
    score for each query head that takes its share of the weights and gives nothing (gpt-oss).
    """

    kv_heads: int
    groups: int
    head_dim: int
    scale: float
    windows: tuple[int, ...]
    softcap: float = 0.0
    sinks: bool = False

    @classmethod
    def from_config(cls, config: ModelConfig, layers: tuple[int, int]) -> "AttentionShape":
        """That of layers ``first:last`` of a model."""
        first, last = layers
        return cls(
            kv_heads=config.kv_heads,
            groups=config.groups,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            windows=config.windows[first:last],
            softcap=config.attention_softcap,
            sinks=config.sinks,
        )


class LayerAttention(Protocol):
    """Attention of one forward, prepared once and then run by every layer."""

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with rows ``heads`` (``[T, (groups + 2) * kv_heads, head_dim]``: q, k, v).

        Keys and values of these rows are in ``pool`` already; so are those before them. ``sinks``
        are float32 ``[groups * kv_heads]``, if the shape says so. Returns
        ``[T, groups * kv_heads * head_dim]``.
        """


class StaticAttention(LayerAttention, Protocol):
    """Attention of decode steps of one shape, whose tables stay where they are in memory."""

    def load_tables(self, sequences: Sequence[SequenceRows]) -> None:
        """Take the tables of a step, in one copy: a decode row for each row of the shape."""

    def derive_masks(self) -> None:
        """Compute from the tables, on the device, what all layers of the step need."""


class AttentionBackend(Protocol):
    """A backend. It keeps no state between forwards."""

    def prepare_layers(
        self,
        sequences: Sequence[SequenceRows],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerAttention:
        """Make indices and masks for a forward over ``sequences``."""

    def prepare_static(
        self, rows: int, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> StaticAttention:
        """For decode steps of ``rows`` rows, whose tables have ``blocks`` blocks at most."""
