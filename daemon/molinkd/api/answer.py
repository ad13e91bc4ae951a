"""Runs the generations of one request; closes each of them whatever happens."""

import asyncio
from collections.abc import Awaitable, Callable

from molink.errors import WorkerError
from molinkd.api.backend import Backend
from molinkd.api.choice import ChoiceText, TextPiece
from molinkd.api.metrics import RequestRecorder
from molinkd.api.request_plan import ChoicePlan, Plan

#: Called with the index of a choice and what was added to it.
Emit = Callable[[int, TextPiece], Awaitable[None]]


class Usage:
    """What ``usage`` reports of one request: tokens of its prompts and of all its answers."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}

    def count(self, choice: ChoicePlan, text: ChoiceText) -> None:
        """Add an answer that is over. A prompt with ``n`` answers is counted once."""
        self.completion_tokens += text.tokens
        cached = min(text.cached, self._cached.get(choice.prompt, text.cached))
        self._cached[choice.prompt] = cached

    def as_json(self) -> dict[str, object]:
        """The ``usage`` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


async def generate_all(
    backend: Backend, plan: Plan, recorder: RequestRecorder, emit: Emit
) -> Usage:
    """Run every choice of ``plan`` at once, handing what they add to ``emit``.

    A choice that fails ends the others. When this coroutine is cancelled, so are they.

    Raises:
        MolinkError: what the backend raised; of several choices' errors, the first.
    """
    usage = Usage(plan.prompt_tokens)
    if len(plan.choices) == 1:
        await _generate(backend, plan, plan.choices[0], usage, recorder, emit)
        return usage
    try:
        async with asyncio.TaskGroup() as group:
            for choice in plan.choices:
                group.create_task(_generate(backend, plan, choice, usage, recorder, emit))
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    return usage


async def _generate(
    backend: Backend,
    plan: Plan,
    choice: ChoicePlan,
    usage: Usage,
    recorder: RequestRecorder,
    emit: Emit,
) -> None:
    text = ChoiceText(plan)
    timer = recorder.generation(len(choice.request.prompt))
    tokens = backend.generate(choice.request)
    try:
        async for token in tokens:
            timer.token()
            piece = text.add(token)
            if piece is not None:
                await emit(choice.index, piece)
                if piece.finish is not None:
                    return
        raise WorkerError("the pipeline ended the answer early; try again")
    finally:
        await tokens.aclose()
        timer.end()
        usage.count(choice, text)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
