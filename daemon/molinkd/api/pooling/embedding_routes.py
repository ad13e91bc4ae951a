"""The handlers of ``/v1/embeddings``, and of Ollama's ``/api/embed`` and ``/api/embeddings``."""

import base64
import math
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web
from msgspec import json

from molink.errors import RequestError, WorkerError
from molink.facts.dtypes import DTYPE_SIZES
from molink.swarm.frontend.generated_token import GeneratedToken
from molinkd.api.body_reader import BodyReader
from molinkd.api.generation_handler import json_response
from molinkd.api.model_catalog import LoadedModel, ModelCatalog
from molinkd.api.ollama.schema import ModelReference, OllamaOptions
from molinkd.api.openai.schema import CompletionBody
from molinkd.api.pooling.handler import PoolingAnswer, PoolingHandler, PoolingRequest
from molinkd.api.pooling.schema import (
    MAX_INPUTS,
    EmbeddingBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    PoolingBody,
)
from molinkd.api.prompt_tokenization import max_characters

#: Bytes of one answer, and of a number in it: as JSON, and in base64.
MAX_ANSWER_BYTES = 64 << 20
_JSON_BYTES, _BASE64_BYTES = 22, 6
_NANOSECONDS = 1e9

#: An embedding as JSON.
Encode = Callable[["array[float]"], msgspec.Raw]


@dataclass(frozen=True, slots=True)
class EmbeddingRoutes:
    """``/v1/embeddings``, ``/api/embed``, ``/api/embeddings``."""

    body_reader: BodyReader
    catalog: ModelCatalog
    handler: PoolingHandler

    @property
    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            web.post("/v1/embeddings", self.create_embeddings),
            web.post("/api/embed", self.embed_texts),
            web.post("/api/embeddings", self.embed_prompt),
        ]

    async def create_embeddings(self, request: web.Request) -> web.Response:
        """``POST /v1/embeddings``."""
        body = await self.body_reader.decode_request(request, EmbeddingBody)
        is_base64 = body.encoding_format == "base64"
        loaded_model, answer = await self._embed(
            request, body, body.input, body.dimensions, is_base64=is_base64
        )
        data = [
            {"object": "embedding", "index": index, "embedding": embedding}
            for index, embedding in enumerate(answer.results)
        ]
        tokens = answer.num_tokens
        found = {
            "object": "list",
            "data": data,
            "model": loaded_model.model.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return json_response(json.encode(found))

    async def embed_texts(self, request: web.Request) -> web.Response:
        """``POST /api/embed``."""
        body = await self.body_reader.decode_request(request, OllamaEmbedBody)
        if not body.input:
            loaded_model = await self._load_model(body.served_name)
            found = {"model": loaded_model.model.name, "embeddings": []}
            return json_response(json.encode(found))
        loaded_model, answer = await self._embed(
            request,
            _pooling_body(body, body.options),
            body.input,
            body.dimensions,
            truncates=body.truncate is not False,
        )
        return json_response(
            json.encode(
                {
                    "model": loaded_model.model.name,
                    "embeddings": answer.results,
                    "total_duration": round(answer.total_s * _NANOSECONDS),
                    "load_duration": round(answer.tokenized_s * _NANOSECONDS),
                    "prompt_eval_count": answer.num_tokens,
                }
            )
        )

    async def embed_prompt(self, request: web.Request) -> web.Response:
        """``POST /api/embeddings``, the older route of ``/api/embed`` for one text."""
        body = await self.body_reader.decode_request(request, OllamaEmbeddingsBody)
        if not body.prompt:
            await self._load_model(body.served_name)
            return json_response(json.encode({"embedding": []}))
        _, answer = await self._embed(
            request, _pooling_body(body, body.options), body.prompt, field="prompt", truncates=True
        )
        return json_response(json.encode({"embedding": answer.results[0]}))

    async def _load_model(self, name: str | None) -> LoadedModel:
        loaded_model = await self.catalog.load_model(name)
        if loaded_model.model.task.name != "embed":
            raise RequestError(
                f"`model`: {loaded_model.model.name} is not an embedding model: serve one whose "
                "embedding is the last token's row, such as Qwen3-Embedding",
                "model",
            )
        return loaded_model

    async def _embed(
        self,
        request: web.Request,
        body: PoolingBody,
        texts: str | list[object] | list[str],
        dimensions: int | None = None,
        *,
        field: str = "input",
        is_base64: bool = False,
        truncates: bool = False,
    ) -> tuple[LoadedModel, PoolingAnswer[msgspec.Raw]]:
        loaded_model = await self._load_model(body.model)
        size = loaded_model.model.hidden_size
        if dimensions is not None and dimensions > size:
            raise RequestError(
                f"`dimensions`: {dimensions}, and embeddings of {loaded_model.model.name} have "
                f"{size}",
                "dimensions",
            )
        _check_texts(texts, field, (dimensions or size) * _number_bytes(is_base64=is_base64))
        if truncates:
            texts = _cut_texts(texts, max_characters(loaded_model))
        encode = encode_base64 if is_base64 else encode_numbers

        def convert(token: GeneratedToken) -> msgspec.Raw:
            return encode(normalize_row(token.pooled, size, dimensions or size))

        answer = await self.handler.compute_results(
            request,
            loaded_model,
            PoolingRequest(body, CompletionBody(prompt=texts), field, convert, truncates=truncates),
        )
        return loaded_model, answer


def _number_bytes(*, is_base64: bool) -> int:
    return _BASE64_BYTES if is_base64 else _JSON_BYTES


def _check_texts(texts: str | Sequence[object], field: str, nbytes: int) -> None:
    """Refuse empty texts and too many; an embedding takes ``nbytes`` of the answer."""
    if isinstance(texts, str):
        texts = [texts]
    elif not texts:
        raise RequestError(f"`{field}`: the list is empty", field)
    elif type(texts[0]) is int:
        return
    most = min(MAX_INPUTS, MAX_ANSWER_BYTES // nbytes)
    if len(texts) > most:
        raise RequestError(f"`{field}`: {len(texts)} texts; at most {most} here", field)
    if "" in texts:
        raise RequestError(f"`{field}`: a text is empty", field)


def _cut_texts(texts: str | list[object] | list[str], most: int) -> str | list[object]:
    """Cut texts to ``most`` characters, which have more tokens than fit."""
    if isinstance(texts, str):
        return texts[:most]
    return [text[:most] if isinstance(text, str) else text for text in texts]


def normalize_row(row: bytes, size: int, dimensions: int) -> "array[float]":
    """The first ``dimensions`` numbers of a row of ``size`` (f32), scaled to length 1.

    Raises:
        WorkerError: the row has another size, or numbers that are not finite.
    """
    if len(row) != size * DTYPE_SIZES["f32"]:
        raise WorkerError("the pipeline returned no embedding: its PCs run another version")
    numbers = array("f", row)
    if sys.byteorder == "big":
        numbers.byteswap()
    kept = numbers[:dimensions]
    length = math.hypot(*kept)
    if not math.isfinite(length):
        raise WorkerError("the pipeline returned an embedding that is not finite")
    return array("f", (number / length for number in kept)) if length else kept


def encode_numbers(vector: "array[float]") -> msgspec.Raw:
    """An embedding as a list of numbers."""
    return msgspec.Raw(json.encode(vector.tolist()))


def encode_base64(vector: "array[float]") -> msgspec.Raw:
    """An embedding as base64 of its numbers, f32 in little-endian order."""
    if sys.byteorder == "big":
        vector.byteswap()
    return msgspec.Raw(b'"' + base64.b64encode(vector.tobytes()) + b'"')


def _pooling_body(body: ModelReference, options: OllamaOptions | None) -> PoolingBody:
    options = options or OllamaOptions()
    return PoolingBody(
        model=body.served_name,
        priority=options.priority,
        max_queue_time=options.max_queue_time,
        timeout=options.timeout,
        cache_salt=options.cache_salt,
    )
