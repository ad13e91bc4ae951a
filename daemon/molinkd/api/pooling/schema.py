"""Bodies of the routes for embeddings and rankings, in the formats of OpenAI, Ollama and Jina."""

from typing import Annotated, Any, Literal

import msgspec

from molink.wire.messages.serving import Priority
from molinkd.api.ollama.schema import ModelReference, OllamaOptions
from molinkd.api.openai.schema import CacheSalt, Seconds

#: Texts of one request, as in OpenAI's API.
MAX_INPUTS = 2048

Dimensions = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class PoolingBody(msgspec.Struct, kw_only=True):
    """Fields of all routes; see :class:`~molinkd.api.openai.schema.GenerationBody`."""

    #: Optional if only one model is served.
    model: str | None = None
    priority: Priority | None = None
    max_queue_time: Seconds | None = None
    timeout: Seconds | None = None
    cache_salt: CacheSalt | None = None
    #: Refused: too long texts are never cut, but for Ollama's clients.
    truncate_prompt_tokens: Any = None


class EmbeddingBody(PoolingBody, kw_only=True):
    """The body of ``POST /v1/embeddings``; ``input`` is validated when it is tokenized."""

    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None


class RankedText(msgspec.Struct):
    """A document as an object."""

    text: str


class RerankBody(PoolingBody, kw_only=True):
    """The body of ``POST /v1/rerank``."""

    query: Annotated[str, msgspec.Meta(min_length=1)]
    documents: Annotated[list[str | RankedText], msgspec.Meta(min_length=1, max_length=MAX_INPUTS)]
    #: How many of the best to return; 0 and ``None``: all.
    top_n: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    return_documents: bool | None = None
    #: What makes a document relevant, for models that take it.
    instruction: str | None = None

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class OllamaEmbedBody(ModelReference, kw_only=True):
    """The body of ``POST /api/embed``; texts are cut unless ``truncate`` is false."""

    input: str | Annotated[list[str], msgspec.Meta(max_length=MAX_INPUTS)] | None = None
    dimensions: Dimensions | None = None
    truncate: bool | None = None
    options: OllamaOptions | None = None
    keep_alive: str | int | float | None = None


class OllamaEmbeddingsBody(ModelReference, kw_only=True):
    """The body of ``POST /api/embeddings``, which newer clients don't send."""

    prompt: str | None = None
    options: OllamaOptions | None = None
    keep_alive: str | int | float | None = None
