"""What placement goes by: facts about a model."""

from typing import Annotated, Literal

import msgspec

from molink.facts.dtypes import NarrowDType
from molink.facts.scalars import Count, Index, Text

#: Layers of a stage, half-open.
LayerRange = tuple[Index, Index]
#: Which bytes a model consists of (:mod:`molink.checkpoint.manifest`); empty: that isn't known.
Root = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64}:[0-9]{1,8})?$")]
#: A model of the Hugging Face hub at a commit, ``OWNER/NAME@COMMIT``; empty: it isn't from there.
HubRevision = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}@[0-9a-f]{40})?$"
    ),
]
#: How a stage keeps the projections of its layers (:mod:`molink.checkpoint.quantization`).
Quantize = Literal["none", "int8", "nf4"]
#: What a placement is to make least or most: one stream's time per token, or many streams' tokens.
Objective = Literal["latency", "throughput"]
#: Tokens of a KV block, the same at every stage of a pipeline.
BLOCK_SIZE = 16


class BlockWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What weights of few bits take on a CPU that multiplies by these, in bytes.

    Of each part, what stays so, and then what doesn't (in the model's own dtype): of the largest
    layer, and of the ends of the model.
    """

    layer: tuple[Count, Count]
    first: tuple[Count, Count]
    last: tuple[Count, Count]


class NarrowWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes (in the model's own dtype) of weights that may stay in 16 bits beside rows of more.

    Of the largest layer, and of the output head.
    """

    dtype: NarrowDType
    layer: Count
    last: Count


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What placement has to know of a model, in bytes (in its own dtype) and tokens.

    ``element_bytes`` is the size of a weight; another dtype scales the byte counts, but not those
    of quantized projections. What has a default was unknown to earlier versions.
    """

    name: Text
    layers: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    layer_bytes: Count
    #: Embedding (first stage) and final norm + output head (last stage).
    first_bytes: Count
    last_bytes: Count
    #: KV cache of one token in one layer.
    kv_bytes: Count
    max_model_len: Count
    element_bytes: Annotated[int, msgspec.Meta(ge=1, le=8)] = 2
    #: Of ``layer_bytes``, those of the projections; and what these take as int8 and as nf4.
    projection_bytes: Count = 0
    int8_bytes: Count = 0
    nf4_bytes: Count = 0
    #: Where there are such weights.
    block_weights: BlockWeights | None = None
    narrow: NarrowWeights | None = None
    #: Elements of the largest merged projection of a layer.
    widest: Count = 0
    #: Elements that one row of a step takes in a layer, at most; and its own.
    row_elements: Count = 0
    hidden: Count = 0
    #: Heads for which attention keeps all scores, where these are capped (Gemma 2).
    score_heads: Count = 0
    vocabulary: Count = 0
    #: The output head is the embedding: a stage with both ends holds it once.
    tied: bool = False
    #: How the files themselves are quantized.
    quantized: Quantize = "none"
    #: Named by the PC that brings the model: others believe no bytes but these.
    root: Root = ""
    #: Where others may have it from too: ``OWNER/NAME@COMMIT`` of the Hugging Face hub.
    hub: HubRevision = ""
    #: What is fetched beside weights: tokenizer, config, the list of hashes.
    extra_bytes: Count = 0
    #: Of a model whose shards are fetched as they are: those of all shards.
    files_bytes: Count = 0
