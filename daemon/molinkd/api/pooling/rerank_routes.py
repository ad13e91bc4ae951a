"""The handler of ``/v1/rerank``: documents by their relevance for a query.

A reranker answers a prompt by one of two tokens, as "yes" and "no". The score of a document is the
probability of the first, if only these two are possible.
"""

import math
from dataclasses import dataclass

from aiohttp import web
from msgspec import json

from molink.errors import RequestError, WorkerError
from molink.swarm.frontend.generated_token import GeneratedToken
from molink.wire.messages.data_plane import SamplingParams
from molinkd.api.body_reader import BodyReader
from molinkd.api.generation_handler import json_response
from molinkd.api.model_catalog import LoadedModel, ModelCatalog
from molinkd.api.pooling.handler import PoolingHandler, PoolingRequest
from molinkd.api.pooling.schema import RerankBody

#: In the names of rerankers that were released without ``modules.json``, and their tokens.
_RERANKER_NAME, _RELEVANT, _IRRELEVANT = "reranker", "yes", "no"


@dataclass(frozen=True, slots=True)
class RerankRoutes:
    """``/v1/rerank``, which vLLM also has as ``/rerank`` and ``/v2/rerank``."""

    body_reader: BodyReader
    catalog: ModelCatalog
    handler: PoolingHandler

    @property
    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        paths = ("/v1/rerank", "/v2/rerank", "/rerank")
        return [web.post(path, self.rank_documents) for path in paths]

    async def rank_documents(self, request: web.Request) -> web.Response:
        """``POST /v1/rerank``."""
        body = await self.body_reader.decode_request(request, RerankBody)
        loaded_model = await self.catalog.load_model(body.model)
        relevant, irrelevant = tokens = find_score_tokens(loaded_model)
        params = SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=tokens)

        def convert(token: GeneratedToken) -> float:
            logprobs = dict(token.top)
            if relevant not in logprobs or irrelevant not in logprobs:
                raise WorkerError("the pipeline returned no score: its PCs run another version")
            return _sigmoid(logprobs[relevant] - logprobs[irrelevant])

        answer = await self.handler.compute_results(
            request, loaded_model, PoolingRequest(body, body, "documents", convert, params)
        )
        scores, texts = answer.results, body.texts
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({} if body.return_documents is False else {"document": {"text": texts[index]}})
            for index in best[: body.top_n or len(best)]
        ]
        tokens_used = answer.num_tokens
        found = {
            "model": loaded_model.model.name,
            "results": results,
            "usage": {"prompt_tokens": tokens_used, "total_tokens": tokens_used},
        }
        return json_response(json.encode(found))


def find_score_tokens(loaded_model: LoadedModel) -> tuple[int, int]:
    """The tokens of a relevant and of an irrelevant document.

    Raises:
        RequestError: the model is no reranker.
    """
    model = loaded_model.model
    if model.task.name == "rerank":
        return model.task.relevant_token, model.task.irrelevant_token
    if model.task.name == "generate" and _RERANKER_NAME in model.pipeline_model.lower():
        found = [loaded_model.tokenizer.find_token_id(text) for text in (_RELEVANT, _IRRELEVANT)]
        if found[0] is not None and found[1] is not None:
            return found[0], found[1]
    raise RequestError(
        f"`model`: {model.name} is not a reranker: serve one that answers yes or no, such as "
        "Qwen3-Reranker",
        "model",
    )


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
