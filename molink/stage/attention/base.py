"""Interface of attention backends."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.tensor_layout import mtp_layers
from molink.checkpoint.traits import HeadShape
from molink.facts.model import KVCacheDType
from molink.stage.attention.token_choice import TokenChoice
from molink.stage.batch import SequenceRows
from molink.stage.kv_pool import KVPool

#: A position, or positions.
Positions = TypeVar("Positions", int, Tensor)
BackendName = Literal["auto", "flash", "triton", "compiled", "gather", "plain"]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Model properties, and the form of KV, that a backend depends on.

    ``groups`` is query heads per KV head; ``kv_kinds`` is 1 if keys serve as values, otherwise 2.
    Scores are ``scale * q·k``. ``windows`` is per layer with attention, 0 = full attention. Windows
    slide, unless they are ``chunked``: then a row attends only to its own chunk, of the window's
    length. With ``chooses`` rows attend to positions that they select (sparse attention). A
    ``softcap`` above 0 bounds scores to ``softcap * tanh(score / softcap)`` (Gemma 2). With
    ``sinks`` each query head has a learned score that takes part in the softmax only (gpt-oss).
    With ``whole_images`` rows of an image attend to the whole image, with ``causal_full_layers``
    only in layers with a window.
    """

    kv_heads: int
    groups: int
    head_dim: int
    scale: float
    windows: tuple[int, ...]
    softcap: float = 0.0
    sinks: bool = False
    kv_cache_dtype: KVCacheDType = "auto"
    kv_kinds: int = 2
    chunked: bool = False
    chooses: bool = False
    whole_images: bool = False
    causal_full_layers: bool = False

    def first_visible(self, position: Positions, window: int) -> Positions:
        """Return the first position that a row at ``position`` attends to; may be negative.

        ``window`` must be above 0.
        """
        return position // window * window if self.chunked else position - window + 1

    def sees_whole_images(self, window: int) -> bool:
        """Whether rows of an image attend to the whole image in layers with ``window``."""
        return self.whole_images and bool(window or not self.causal_full_layers)

    @property
    def quantizes(self) -> bool:
        """Whether KV is in 8 bits."""
        return self.kv_cache_dtype == "int8"

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        layers: tuple[int, int],
        kv_cache_dtype: KVCacheDType = "auto",
        heads: HeadShape | None = None,
    ) -> "AttentionShape":
        """Return the shape of a model's layers ``first:last`` that have such ``heads``.

        ``heads`` defaults to those of the range's first layer with attention, or of layer 0 if
        there is none. At the last stage the MTP layer is included.
        """
        behind = mtp_layers(config) if layers[1] == config.layers else ()
        attended = [layer for layer in (*range(*layers), *behind) if config.has_attention(layer)]
        heads = heads or config.head_shape(attended[0] if attended else 0)
        windows = (config.layer_window(one) for one in attended if config.head_shape(one) == heads)
        return cls(
            kv_heads=heads.kv_heads,
            groups=config.heads // heads.kv_heads,
            head_dim=heads.head_dim,
            scale=config.attention_scale,
            windows=tuple(windows) or (0,),
            softcap=config.attention_softcap,
            sinks=config.sinks,
            kv_cache_dtype=kv_cache_dtype,
            kv_kinds=config.kv_kinds,
            chunked=config.chunked_windows,
            chooses=config.latent is not None and config.latent.index is not None,
            whole_images=config.sees_whole_images,
            causal_full_layers=config.vision is not None and config.vision.causal_full_layers,
        )


class LayerAttention(Protocol):
    """Attention metadata of one forward, shared by all layers."""

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with ``heads`` (``[T, (groups + 2) * kv_heads, head_dim]``: q, k, v).

        ``pool`` holds keys and values up to and including these rows. ``sinks`` are float32
        ``[groups * kv_heads]``. Returns ``[T, groups * kv_heads * head_dim]``.
        """


@runtime_checkable
class ChoosingAttention(LayerAttention, Protocol):
    """A :class:`LayerAttention` that also supports attention to selected positions."""

    def attend_chosen(self, layer: int, heads: Tensor, pool: KVPool, choice: TokenChoice) -> Tensor:
        """Attend to the positions that ``choice`` selects, without sinks: ``[T, heads * d]``."""


class StaticAttention(LayerAttention, Protocol):
    """Attention of fixed-shape decode steps in static buffers, for CUDA graphs."""

    def pack_tables(self, sequences: Sequence[SequenceRows]) -> "array[int]":
        """Pack a step's block tables (int32) for the buffer; each row is a decode row."""

    def derive_masks(self) -> None:
        """Derive masks and indices from the tables, on the device."""


#: Returns an int32 buffer for tables on the device, given its number of elements.
AllocateTables = Callable[[int], Tensor]


class AttentionBackend(Protocol):
    """An attention backend; stateless between forwards."""

    @property
    def reads_pages(self) -> bool:
        """Whether KV is read in place, so that steps need no memory for copies and masks."""

    @property
    def reads_unwritten(self) -> bool:
        """Whether positions beyond a request's last are read, which then must not hold NaN."""

    @property
    def spans_context(self) -> bool:
        """Whether the cost of a static form is independent of its maximum number of blocks."""

    def prepare_layers(
        self,
        sequences: Sequence[SequenceRows],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerAttention:
        """Prepare indices and masks of a forward."""

    def prepare_static(
        self,
        rows: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        allocate_tables: AllocateTables,
    ) -> StaticAttention:
        """Prepare decode steps of ``rows`` rows with up to ``blocks`` blocks each.

        May call ``allocate_tables`` once.
        """
