"""Computes one result for each prompt of a request, such as an embedding or a score."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from aiohttp import web

from molink.errors import ContextTooLong, DeadlineExceeded, RequestError, WorkerError
from molink.swarm.frontend.generated_token import GeneratedToken
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import Request
from molinkd.api.access_guard import client_id, client_name
from molinkd.api.backend import Backend
from molinkd.api.cache_salts import CacheSalts
from molinkd.api.generation_handler import RunningAnswers
from molinkd.api.generation_runner import first_error
from molinkd.api.metrics import RequestRecorder
from molinkd.api.model_catalog import LoadedModel
from molinkd.api.openai.schema import GenerationBody
from molinkd.api.pooling.schema import PoolingBody, RerankBody
from molinkd.api.prompt_worker_pool import PromptTokenizer
from molinkd.api.protocol_conversion import refuse_fields, rename_error_fields

#: Prompts of one request that the swarm has at once; more would displace other requests of the
#: client from a scheduler's queue.
MAX_CONCURRENT = 32

_GREEDY = SamplingParams(temperature=0.0)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PoolingRequest(Generic[Result]):
    """Prompts, and how their results are made.

    ``prompts`` is tokenized; ``field`` is the client's name of its texts. ``convert`` makes a
    result of the token that ends a prompt. With ``truncates``, prompts are cut to the context.
    """

    body: PoolingBody
    prompts: GenerationBody | RerankBody
    field: str
    convert: Callable[[GeneratedToken], Result]
    sampling_params: SamplingParams = _GREEDY
    truncates: bool = False


@dataclass(frozen=True, slots=True)
class PoolingAnswer(Generic[Result]):
    """The results in the order of the prompts, the prompts' tokens, and seconds."""

    results: list[Result]
    num_tokens: int
    tokenized_s: float
    total_s: float


class PoolingHandler:
    """Tokenizes prompts and has the swarm compute each."""

    def __init__(
        self,
        backend: Backend,
        recorder: RequestRecorder,
        reader: PromptTokenizer,
        running_answers: RunningAnswers,
        *,
        share_prefix_cache: bool = False,
    ) -> None:
        self._backend = backend
        self._recorder = recorder
        self._prompt_tokenizer = reader
        self._running_answers = running_answers
        self._cache_salts = CacheSalts(is_shared=share_prefix_cache)

    async def compute_results(
        self,
        request: web.Request,
        loaded_model: LoadedModel,
        pooling_request: PoolingRequest[Result],
    ) -> PoolingAnswer[Result]:
        """Compute the results of all prompts; cancelling this coroutine cancels all.

        Raises:
            MolinkError: the first error of a prompt, which ends the others.
            DeadlineExceeded: not all results came in time.
        """
        began, body = time.perf_counter(), pooling_request.body
        refuse_fields({"truncate_prompt_tokens": body.truncate_prompt_tokens})
        limit = asyncio.timeout(body.timeout)
        try:
            async with limit, self._running_answers.track_answer():
                prompts = await self._tokenize(request, loaded_model, pooling_request)
                tokenized_s = time.perf_counter() - began
                requests = self._make_requests(
                    request, loaded_model, pooling_request, prompts, tokenized_s
                )
                results = await self._run_all(requests, pooling_request.convert)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(f"not finished within {body.timeout:g} s (`timeout`)") from None
        num_tokens, total_s = sum(map(len, prompts)), time.perf_counter() - began
        return PoolingAnswer(results, num_tokens, tokenized_s, total_s)

    async def _tokenize(
        self,
        request: web.Request,
        loaded_model: LoadedModel,
        pooling_request: PoolingRequest[Result],
    ) -> list[tuple[int, ...]]:
        field, model = pooling_request.field, loaded_model.model
        try:
            tokenized = await self._prompt_tokenizer.tokenize_prompts(
                client_name(request), loaded_model, pooling_request.prompts
            )
        except RequestError as error:
            names = {"prompt": field, "prompt[]": f"{field}[]"}
            raise rename_error_fields(error, names) from None
        # The scheduler's limit includes a token after the prompt.
        most, found = model.max_model_len - 1, list[tuple[int, ...]]()
        for index, prompt in enumerate(tokenized.prompts):
            ids = prompt.ids
            if pooling_request.truncates:
                ids = truncate_ids(ids, most, loaded_model.tokenizer)
            if len(ids) > most:
                name = field if len(tokenized.prompts) == 1 else f"{field}[{index}]"
                raise ContextTooLong(
                    f"`{name}`: {len(ids)} tokens, and {model.name} takes {most}", name
                )
            found.append(ids)
        return found

    def _make_requests(
        self,
        request: web.Request,
        loaded_model: LoadedModel,
        pooling_request: PoolingRequest[Result],
        prompts: Sequence[tuple[int, ...]],
        elapsed_s: float,
    ) -> list[Request]:
        body = pooling_request.body
        salt = self._cache_salts.derive_salt(request, body.cache_salt)
        left = max(body.timeout - elapsed_s, 1e-3) if body.timeout is not None else 0.0
        return [
            Request(
                model=loaded_model.model.pipeline_model,
                adapter=loaded_model.model.adapter,
                prompt_token_ids=ids,
                max_tokens=1,
                sampling_params=pooling_request.sampling_params,
                client=client_id(request),
                cache_salt=salt,
                priority=body.priority or 0,
                max_queue_s=body.max_queue_time or 0.0,
                deadline_s=left,
            )
            for ids in prompts
        ]

    async def _run_all(
        self, requests: Sequence[Request], convert: Callable[[GeneratedToken], Result]
    ) -> list[Result]:
        results: dict[int, Result] = {}

        async def run_next(pending: Iterator[tuple[int, Request]]) -> None:
            for index, one in pending:
                results[index] = convert(await self._run_one(one))

        pending = iter(enumerate(requests))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(MAX_CONCURRENT, len(requests))):
                    group.create_task(run_next(pending))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return [results[index] for index in range(len(requests))]

    async def _run_one(self, request: Request) -> GeneratedToken:
        timer = self._recorder.start_generation(len(request.prompt_token_ids))
        tokens = self._backend.generate(request)
        try:
            token = await anext(tokens, None)
        finally:
            await tokens.aclose()
            timer.record_end()
        if token is None:
            raise WorkerError("the pipeline ended the request early; try again")
        return token


def truncate_ids(ids: tuple[int, ...], most: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Cut a text's ids to ``most``; special tokens at its end stay, since their rows are pooled."""
    if len(ids) <= most:
        return ids
    ends, kept = tokenizer.encode(""), 0
    while kept < len(ends) and ends[-1 - kept] == ids[-1 - kept]:
        kept += 1
    return (*ids[: most - kept], *ids[len(ids) - kept :])
