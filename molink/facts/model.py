"""Facts of a model for placement."""

from typing import Annotated, Literal

import msgspec

from molink.facts.dtypes import NarrowDType
from molink.facts.scalars import Count, Index, Text

#: Layers of a stage, half-open.
LayerRange = tuple[Index, Index]
#: Hash of a model's bytes (:mod:`molink.checkpoint.manifest`); empty if unknown.
Root = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64}:[0-9]{1,8})?\Z")]
#: A model of the Hugging Face hub at a commit, ``OWNER/NAME@COMMIT``; empty if from elsewhere.
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
#: What a placement optimizes: one stream's time per token, or the tokens of many streams.
Objective = Literal["latency", "throughput"]
#: Tokens of a KV block, the same at every stage of a pipeline.
BLOCK_SIZE = 16
#: Adapters of one model; each takes its share of every stage's memory.
MAX_ADAPTERS = 32
#: Name of an adapter, by which requests choose it as if it were a model; empty for none.
AdapterName = Annotated[str, msgspec.Meta(max_length=64)]
#: Folders of adapters on this PC, by name.
AdapterFolders = Annotated[
    dict[AdapterName, Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]],
    msgspec.Meta(max_length=MAX_ADAPTERS),
]


class BlockWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of block-quantized weights on a device with kernels for them.

    Each pair is what stays quantized and what doesn't (in the model's dtype): of the largest layer,
    and of the ends of the model.
    """

    layer: tuple[Count, Count]
    first: tuple[Count, Count]
    last: tuple[Count, Count]


class NarrowWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes (in the model's dtype) of weights that may stay in 16 bits although rows are f32.

    Of the largest layer, and of the output head.
    """

    dtype: NarrowDType
    layer: Count
    last: Count


class LayerWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of weights of a layer, or of a part of it, in the forms that a device may keep.

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

    ``least`` and ``most`` are the weights of all experts of a layer, which differ between layers
    that are stored in different formats.
    """

    num_experts: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    top_k: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    least: LayerWeights
    most: LayerWeights
    #: Layers without experts, and the weights of the largest one.
    dense_layers: Annotated[tuple[Index, ...], msgspec.Meta(max_length=4096)] = ()
    dense: LayerWeights = LayerWeights()


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a model in bytes (in its dtype) and tokens.

    ``element_bytes`` is the size of a weight; another dtype scales the byte counts except those of
    quantized projections.
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
    #: KV cache of one token in one layer with attention.
    kv_bytes: Count
    #: The same with ``int8``.
    int8_kv_bytes: Count = 0
    #: Recurrent layers, which usually have none, and what each keeps of a request, in float32.
    recurrent_layers: Annotated[tuple[Index, ...], msgspec.Meta(max_length=4096)] = ()
    state_bytes: Count = 0
    #: Whether recurrent layers have keys and values, too.
    parallel_states: bool = False
    #: Layers that keep nothing of a request.
    mlp_layers: Annotated[tuple[Index, ...], msgspec.Meta(max_length=4096)] = ()
    #: MTP layers in the last stage, besides ``layers``.
    mtp_layers: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    max_model_len: Count
    element_bytes: Annotated[int, msgspec.Meta(ge=1, le=8)] = 2
    #: The projections among ``layer_bytes``, and their size as int8 and as nf4.
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
    #: Maximum elements of a step's row in a layer, and of the row itself.
    row_elements: Count = 0
    hidden: Count = 0
    #: Heads with capped scores (Gemma 2), for which attention keeps all scores.
    score_heads: Count = 0
    #: Heads that are too large for a GPU's kernels, so that it copies pages and keeps all scores.
    large_heads: Count = 0
    vocabulary: Count = 0
    #: The output head is the embedding: a stage with both ends holds it once.
    tied: bool = False
    #: Quantization of the files themselves.
    quantized: Quantize = "none"
    #: Set by the PC that loads the model; other PCs accept only these bytes.
    root: Root = ""
    #: Where else it is available: ``OWNER/NAME@COMMIT`` of the Hugging Face hub.
    hub: HubRevision = ""
    #: Files besides the weights: tokenizer, config, list of hashes.
    extra_bytes: Count = 0
    #: All shards of a model whose shards are fetched as they are.
    files_bytes: Count = 0

    def scale_bytes(self, stored: int, element: int) -> int:
        """Bytes of ``stored`` bytes in the model's dtype, in one of ``element`` bytes."""
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
