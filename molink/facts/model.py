"""Facts of a model for placement."""

from typing import Annotated, Literal

import msgspec

from molink.facts.dtypes import NarrowDType
from molink.facts.scalars import Count, Index, Text

#: Layers of a stage, half-open.
LayerRange = tuple[Index, Index]
#: Hash of a model's bytes (:mod:`molink.checkpoint.manifest`); empty if unknown.
Root = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64}:[0-9]{1,8})?\Z")]
#: A model of the Hugging Face hub at a commit, ``OWNER/NAME@COMMIT``; empty for other models.
HubRevision = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}@[0-9a-f]{40})?\Z"
    ),
]
#: How a stage quantizes its projections (:mod:`molink.checkpoint.quantized_size`).
Quantize = Literal["none", "int8", "nf4"]
#: How a stage keeps keys and values: as its rows (``auto``), or in 8 bits.
KVCacheDType = Literal["auto", "int8"]
#: A placement's objective: one stream's time per token, or the throughput of many streams.
Objective = Literal["latency", "throughput"]
#: Tokens of a KV block, the same at every stage of a pipeline.
BLOCK_SIZE = 16
#: Maximum adapters of one model; each takes memory of every stage.
MAX_ADAPTERS = 32
#: An adapter's name, which requests give as their model; empty for none.
AdapterName = Annotated[str, msgspec.Meta(max_length=64)]
#: Folders of adapters on this PC, by name.
AdapterFolders = Annotated[
    dict[AdapterName, Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]],
    msgspec.Meta(max_length=MAX_ADAPTERS),
]


class BlockWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of block-quantized weights on a device with kernels for them.

    Each pair has the bytes that stay quantized and those that don't (in the model's dtype), for the
    largest layer and for the ends of the model.
    """

    layer: tuple[Count, Count]
    first: tuple[Count, Count]
    last: tuple[Count, Count]


class NarrowWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes (in the model's dtype) of weights that may stay in 16 bits while rows are float32.

    They are those of the largest layer, and of the output head.
    """

    dtype: NarrowDType
    layer: Count
    last: Count


class LayerWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a layer's weights, or of some of them, in each form that a device may keep.

    ``layer_bytes`` (of which ``projection_bytes`` can be quantized) and ``narrow_bytes`` are in the
    model's dtype; the pairs of ``block_bytes`` (on a CPU) and ``plane_bytes`` (on a GPU) are as in
    :class:`BlockWeights`.
    """

    layer_bytes: Count = 0
    projection_bytes: Count = 0
    int8_bytes: Count = 0
    nf4_bytes: Count = 0
    narrow_bytes: Count = 0
    block_bytes: tuple[Count, Count] = (0, 0)
    plane_bytes: tuple[Count, Count] = (0, 0)


class ExpertFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Routed experts of a layer, of which a row chooses ``top_k``.

    ``least`` and ``most`` are the weights of all experts in the smallest and the largest layer,
    since layers may be stored in different formats.
    """

    num_experts: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    top_k: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    least: LayerWeights
    most: LayerWeights
    #: Layers without experts, and the weights of the largest of them.
    dense_layers: Annotated[tuple[Index, ...], msgspec.Meta(max_length=4096)] = ()
    dense: LayerWeights = LayerWeights()


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a model, in bytes (in its dtype) and tokens.

    ``element_bytes`` is the size of a weight; with another dtype, all byte counts but those of
    quantized projections scale.
    """

    name: Text
    layers: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    layer_bytes: Count
    #: Embedding (first stage); final norm and output head (last stage).
    first_bytes: Count
    last_bytes: Count
    #: Vision tower and connector (first stage), and elements of its rows for the largest image.
    vision_bytes: Count = 0
    image_elements: Count = 0
    #: Minimum number of layers of the first stage.
    first_layers: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    #: KV cache of one token in one layer with attention.
    kv_bytes: Count
    #: The same with an int8 KV cache.
    int8_kv_bytes: Count = 0
    #: Recurrent layers, which usually have no KV, and bytes of a request's slot in each: its
    #: float32 state and what is kept for its drafts.
    recurrent_layers: Annotated[tuple[Index, ...], msgspec.Meta(max_length=4096)] = ()
    state_bytes: Count = 0
    #: Whether recurrent layers have keys and values, too.
    parallel_states: bool = False
    #: Layers that keep nothing per request.
    mlp_layers: Annotated[tuple[Index, ...], msgspec.Meta(max_length=4096)] = ()
    #: MTP layers in the last stage, besides ``layers``.
    mtp_layers: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    max_model_len: Count
    element_bytes: Annotated[int, msgspec.Meta(ge=1, le=8)] = 2
    #: Bytes of the projections within ``layer_bytes``, and their size as int8 and as nf4.
    projection_bytes: Count = 0
    int8_bytes: Count = 0
    nf4_bytes: Count = 0
    #: Weights that stay block-quantized on a CPU, and on a GPU.
    block_weights: BlockWeights | None = None
    plane_weights: BlockWeights | None = None
    narrow: NarrowWeights | None = None
    experts: ExpertFacts | None = None
    #: Elements of the largest merged projection of a layer.
    widest: Count = 0
    #: Peak elements per row of a step in a layer, and elements of the row itself.
    row_elements: Count = 0
    hidden: Count = 0
    #: Heads with capped scores (Gemma 2), for which attention materializes all scores.
    score_heads: Count = 0
    #: Heads too large for GPU kernels, so that a GPU copies pages and materializes all scores.
    large_heads: Count = 0
    vocabulary: Count = 0
    #: Whether the output head is the embedding, which a stage with both ends holds once.
    tied: bool = False
    #: Quantization of the files themselves.
    quantized: Quantize = "none"
    #: Hash set by the PC that loads the model; other PCs accept only these bytes.
    root: Root = ""
    #: Another source of the model: ``OWNER/NAME@COMMIT`` of the Hugging Face hub.
    hub: HubRevision = ""
    #: Bytes of files besides the weights: tokenizer, config, list of hashes.
    extra_bytes: Count = 0
    #: Bytes of all shards, if whole shards are fetched.
    files_bytes: Count = 0

    def scale_bytes(self, stored: int, element: int) -> int:
        """Scale ``stored`` bytes in the model's dtype to a dtype of ``element`` bytes."""
        return -(-stored * element // self.element_bytes)

    @property
    def layer_weights(self) -> LayerWeights:
        """Weights of the largest layer."""
        blocks, planes = self.block_weights, self.plane_weights
        return LayerWeights(
            layer_bytes=self.layer_bytes,
            projection_bytes=self.projection_bytes,
            int8_bytes=self.int8_bytes,
            nf4_bytes=self.nf4_bytes,
            narrow_bytes=0 if self.narrow is None else self.narrow.layer,
            block_bytes=(0, 0) if blocks is None else blocks.layer,
            plane_bytes=(0, 0) if planes is None else planes.layer,
        )
