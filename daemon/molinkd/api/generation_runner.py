"""Runs the generations of one request and closes each of them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from molink.errors import DeadlineExceeded, WorkerError
from molink.swarm.frontend.generated_token import GeneratedToken
from molinkd.api.backend import Backend
from molinkd.api.metrics import RequestRecorder
from molinkd.api.output_processor import AnswerFinish, OutputProcessor, TextPiece
from molinkd.api.request_plan import ChoicePlan, RequestPlan

#: Called with the index of a choice and the piece added to it.
Emit = Callable[[int, TextPiece], Awaitable[None]]


class _DeadlinePassedError(Exception):
    """The request's time is over."""


class Usage:
    """Token counts and timings of an answer.

    Times are of ``time.perf_counter``: ``started_at`` when the request was read, ``loaded_at`` when
    the tokenizer was loaded, ``first_token_at`` and ``last_token_at`` of the first and last token.
    """

    def __init__(self, prompt_tokens: int, started_at: float, loaded_at: float) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.started_at, self.loaded_at = started_at, loaded_at
        self.first_token_at = self.last_token_at = 0.0
        self._reasoning_tokens = 0
        self._cached: dict[int, int] = {}
        #: Mean logprob of each choice.
        self.scores: dict[int, float] = {}
        #: Why the last answer ended, and whether a stop string did it.
        self.finish: AnswerFinish | None = None
        self.is_stop_string = False

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning tokens of the answers."""
        return self._reasoning_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return sum(self._cached.values())

    @property
    def prompt_s(self) -> float:
        """Seconds to the first token, after the tokenizer was loaded."""
        return max(self.first_token_at - self.loaded_at, 0.0)

    @property
    def answer_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.last_token_at - self.first_token_at

    def record_token(self, now: float) -> None:
        """Record a token of any choice."""
        self.first_token_at = self.first_token_at or now
        self.last_token_at = now

    def add_answer(self, choice: ChoicePlan, text: OutputProcessor) -> None:
        """Add a finished answer. A prompt with ``n`` answers is counted once."""
        self.completion_tokens += text.tokens
        self.scores[choice.index] = text.score
        self.finish, self.is_stop_string = text.finish, text.is_stop_string
        self._reasoning_tokens += text.reasoning_tokens
        cached = min(text.cached_tokens, self._cached.get(choice.prompt_index, text.cached_tokens))
        self._cached[choice.prompt_index] = cached

    def as_json(self) -> dict[str, object]:
        """Return OpenAI's ``usage`` object."""
        usage: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self._reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._reasoning_tokens}
        return usage

    def to_timings(self) -> dict[str, float]:
        """Return llama-server's ``timings``; the prompt's time lasts until the first token."""
        computed = self.prompt_tokens - self.cached_tokens
        return {
            "cache_n": self.cached_tokens,
            **_speed_fields("prompt", computed, self.prompt_s),
            **_speed_fields("predicted", self.completion_tokens, self.answer_s),
        }


def _speed_fields(name: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }


async def generate_all(
    backend: Backend, plan: RequestPlan, recorder: RequestRecorder, usage: Usage, emit: Emit
) -> None:
    """Run all choices of ``plan`` concurrently; pieces go to ``emit``, counts to ``usage``.

    An error of one choice ends the others. Cancelling this coroutine cancels all.

    Raises:
        MolinkError: the first error of the backend.
        DeadlineExceeded: no token in time; answers that have started are truncated instead.
    """
    if len(plan.choices) == 1:
        await _generate(backend, plan, plan.choices[0], usage, recorder, emit)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for choice in plan.choices:
                group.create_task(_generate(backend, plan, choice, usage, recorder, emit))
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


async def _generate(
    backend: Backend,
    plan: RequestPlan,
    choice: ChoicePlan,
    usage: Usage,
    recorder: RequestRecorder,
    emit: Emit,
) -> None:
    text = OutputProcessor(plan)
    timer = recorder.start_generation(len(choice.request.prompt_token_ids))
    tokens = backend.generate(choice.request)
    most = choice.request.deadline_s
    until = asyncio.get_running_loop().time() + most if most else None
    try:
        while (token := await _next_token(tokens, until)) is not None:
            usage.record_token(timer.record_token())
            piece = text.process_token(token)
            if piece is not None:
                await emit(choice.index, piece)
                if piece.finish is not None:
                    return
        raise WorkerError("the pipeline ended the answer early; try again")
    except _DeadlinePassedError:
        if not usage.first_token_at:
            raise DeadlineExceeded(f"no token came within {most:.1f} s (`timeout`)") from None
        piece = text.cut_off()
        if piece is not None:
            await emit(choice.index, piece)
    finally:
        await tokens.aclose()
        timer.record_end()
        usage.add_answer(choice, text)


async def _next_token(
    tokens: AsyncGenerator[GeneratedToken, None], until: float | None
) -> GeneratedToken | None:
    """Return the next token; ``None`` at the end.

    Raises:
        _DeadlinePassedError: ``until`` (loop time) has passed.
    """
    if until is None:
        return await anext(tokens, None)
    if asyncio.get_running_loop().time() >= until:
        raise _DeadlinePassedError
    limit = asyncio.timeout_at(until)
    try:
        async with limit:
            return await anext(tokens, None)
    except TimeoutError:
        if limit.expired():
            raise _DeadlinePassedError from None
        raise


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
