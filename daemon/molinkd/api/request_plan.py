"""Plans a request: sampling parameters, limits, stops and seeds of each choice."""

import dataclasses
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from molink.errors import ContextTooLong, DeadlineExceeded, RequestError
from molink.text.generation_defaults import GenerationDefaults
from molink.text.tokenizer import Tokenizer
from molink.text.tool_calls.base import AnswerParser
from molink.text.tool_calls.create import AnswerFormat, create_answer_parser
from molink.text.tool_calls.tagged import ToolSchemas
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import MAX_STOP_IDS, Request
from molinkd.api.model_catalog import LoadedModel
from molinkd.api.openai.schema import ChatBody, CompletionBody, GenerationBody
from molinkd.api.prompt_worker_messages import TokenizedPrompts
from molinkd.api.tool_validation import callable_tools, choose_answer_format, required_tools

#: OpenAI's default for completions.
COMPLETION_MAX_TOKENS = 16
#: Maximum characters of all echoed prompts of a request.
MAX_ECHO_CHARACTERS = 4 * 2**20

Piece = TypeVar("Piece")

_SEED_BITS = 52
_SEED_MASK = (1 << _SEED_BITS) - 1
#: ``top_p`` 0 selects the most likely token only.
_MIN_TOP_P = 1e-6
#: For models whose authors chose nothing, as in llama.cpp: small ones write gibberish at
#: temperature 1 with nothing cut off.
_FALLBACK_SAMPLING = GenerationDefaults(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05)


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One answer to generate: ``index`` in the response, ``prompt_index`` of its prompt."""

    index: int
    prompt_index: int
    echo: str
    request: Request


@dataclass(frozen=True, slots=True)
class ParserSettings:
    """How to parse answers: format, callable tools, and the end of the prompt.

    Without ``parallel`` an answer ends with its first call.
    """

    answer_format: AnswerFormat
    tools: ToolSchemas
    prompt_tail: str
    parallel: bool

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that the parser must see."""
        return self.answer_format.special_markers(tools=bool(self.tools))

    def build_parser(self) -> AnswerParser | None:
        """Create the parser of one answer; ``None`` if there is nothing to parse."""
        return create_answer_parser(self.answer_format, self.tools, self.prompt_tail)


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Everything that the answers to one HTTP request need."""

    loaded_model: LoadedModel
    choices: tuple[ChoicePlan, ...]
    prompt_tokens: int
    stop_strings: tuple[str, ...]
    #: Number of top logprobs per token; -1: no logprobs.
    logprobs: int
    #: Answers to generate and to return, per prompt.
    generated: int
    returned: int
    include_stop: bool
    skip_special: bool
    #: Whether the answer continues the prompt's text instead of starting a new one.
    continues_prompt: bool
    #: ``None``: answers are plain content.
    parser_settings: ParserSettings | None = None

    @property
    def is_best_of(self) -> bool:
        """Whether more answers are generated than returned."""
        return self.generated > self.returned


def check_choice_count(body: GenerationBody, maximum: int) -> None:
    """Reject a request with more than ``maximum`` choices, before any work.

    Raises:
        RequestError: there are more.
    """
    count = body.n or 1
    answers = generated = _answers_per_prompt(body)
    if generated < count:
        raise RequestError(f"`best_of`: {generated} is less than `n` ({count})", "best_of")
    if generated > count and body.stream:
        raise RequestError("`best_of` is not supported in streams", "best_of")
    if isinstance(body, CompletionBody) and isinstance(body.prompt, list):
        texts = sum(not isinstance(item, int) for item in body.prompt)
        answers *= max(1, texts)
    if answers > maximum:
        field = "best_of" if generated > count else "n" if count > 1 else "prompt"
        raise RequestError(f"`{field}`: {answers} answers requested; at most {maximum}", field)


def make_plan(
    body: GenerationBody,
    loaded_model: LoadedModel,
    tokenized: TokenizedPrompts,
    client: str = "",
    elapsed_s: float = 0.0,
    cache_salt: bytes = b"",
) -> RequestPlan:
    """Plan the answers to ``body``; ``tokenized`` are its prompts.

    Tokenization took ``elapsed_s`` seconds of the request's time. ``cache_salt`` goes with every
    answer's request.

    Raises:
        RequestError: invalid token ids, or too much to echo.
        ContextTooLong: a prompt and its answer exceed the model's context.
        DeadlineExceeded: no time is left.
    """
    tokenizer, prompts = loaded_model.tokenizer, tokenized.prompts
    count, returned = _answers_per_prompt(body), body.n or 1
    _check_echo(count * sum(len(prompt.text) for prompt in prompts))
    deadline_s = _remaining_s(body, elapsed_s)
    sampling = _sampling(body, tokenizer)
    logprobs = sampling.logprobs
    if count > returned:  # for the comparison
        sampling = msgspec.structs.replace(sampling, logprobs=max(logprobs, 0))
    stop_ids = _stop_ids(body, tokenizer)
    choices: list[ChoicePlan] = []
    for number, prompt in enumerate(prompts):
        request = Request(
            model=loaded_model.model.pipeline_model,
            adapter=loaded_model.model.adapter,
            prompt_token_ids=prompt.ids,
            max_tokens=_max_tokens(body, loaded_model, len(prompt.ids)),
            sampling_params=sampling,
            stop_token_ids=stop_ids,
            grammar=tokenized.grammar,
            client=client,
            cache_salt=cache_salt,
            images=prompt.images,
            priority=body.priority or 0,
            max_queue_s=body.max_queue_time or 0.0,
            deadline_s=deadline_s,
        )
        choices += _plan_copies(request, count, len(choices), number, prompt.text)
    return RequestPlan(
        loaded_model=loaded_model,
        choices=tuple(choices),
        prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
        stop_strings=_stop_strings(body),
        logprobs=logprobs,
        generated=count,
        returned=returned,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        # A grammar constrains every byte, also a leading space.
        continues_prompt=isinstance(body, CompletionBody) or bool(tokenized.grammar),
        parser_settings=_make_parser_settings(body, loaded_model, tokenized),
    )


def _plan_copies(
    request: Request, count: int, index: int, prompt: int, text: str
) -> Iterator[ChoicePlan]:
    """Plan ``count`` answers to one prompt, numbered from ``index``, each with its own seed."""
    for copy in range(count):
        params = request.sampling_params
        seeded = msgspec.structs.replace(params, seed=_derived_seed(params.seed, copy))
        own = msgspec.structs.replace(request, sampling_params=seeded)
        yield ChoicePlan(index + copy, prompt, text, own)


def _check_echo(echoed: int) -> None:
    """Check the characters of the prompts of all answers."""
    if echoed > MAX_ECHO_CHARACTERS:
        text = (
            f"`echo`: the prompts of all answers have {echoed} characters; at most "
            f"{MAX_ECHO_CHARACTERS}"
        )
        raise RequestError(text, "echo")


def _remaining_s(body: GenerationBody, elapsed_s: float) -> float:
    """Return the remaining time in seconds; 0 without a limit."""
    if body.timeout is None:
        return 0.0
    if elapsed_s >= body.timeout:
        raise DeadlineExceeded(
            f"the prompt was not tokenized within {body.timeout:g} s (`timeout`)"
        )
    return body.timeout - elapsed_s


def _answers_per_prompt(body: GenerationBody) -> int:
    """Return how many answers to generate per prompt."""
    best_of = body.best_of if isinstance(body, CompletionBody) else None
    return best_of or body.n or 1


def select_best(
    plan: RequestPlan, answers: Sequence[list[Piece]], scores: Mapping[int, float]
) -> tuple[RequestPlan, list[list[Piece]]]:
    """Select the returned answers of each prompt, likeliest first."""
    kept: list[int] = []
    for prompt in sorted({choice.prompt_index for choice in plan.choices}):
        own = [choice.index for choice in plan.choices if choice.prompt_index == prompt]
        own.sort(key=lambda index: -scores[index])
        kept += own[: plan.returned]
    choices = tuple(
        dataclasses.replace(plan.choices[old], index=new) for new, old in enumerate(kept)
    )
    return dataclasses.replace(plan, choices=choices), [answers[index] for index in kept]


def _make_parser_settings(
    body: GenerationBody, loaded_model: LoadedModel, tokenized: TokenizedPrompts
) -> ParserSettings | None:
    """Choose the parser; ``None`` with ``skip_special_tokens`` off and no tools.

    A structured answer is content, unless its structure is a tool call.
    """
    if not isinstance(body, ChatBody) or (tokenized.grammar and not required_tools(body)):
        return None
    tools = callable_tools(body)
    if body.skip_special_tokens is False and not tools:
        return None
    form = choose_answer_format(loaded_model, tools=bool(tools))
    return ParserSettings(
        form, tools, tokenized.prompts[0].tail, body.parallel_tool_calls is not False
    )


def _sampling(body: GenerationBody, tokenizer: Tokenizer) -> SamplingParams:
    """Merge the client's parameters with the model's defaults, each for itself."""
    chosen = tokenizer.defaults
    defaults = chosen if chosen.says_sampling else _FALLBACK_SAMPLING
    top_k = body.top_k if body.top_k is not None else defaults.top_k or 0
    return SamplingParams(
        temperature=_first_given(body.temperature, defaults.temperature, 1.0),
        top_p=max(_first_given(body.top_p, defaults.top_p, 1.0), _MIN_TOP_P),
        top_k=max(top_k, 0),
        min_p=_first_given(body.min_p, defaults.min_p, 0.0),
        seed=secrets.randbits(_SEED_BITS) if body.seed is None else body.seed & _SEED_MASK,
        repetition_penalty=_first_given(body.repetition_penalty, chosen.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logprobs=_num_logprobs(body),
        logit_bias=_logit_bias(body, tokenizer),
    )


def _first_given(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _num_logprobs(body: GenerationBody) -> int:
    if isinstance(body, CompletionBody):
        if body.logprobs is not None and body.echo:
            raise RequestError("`logprobs` with `echo` is not supported", "logprobs")
        return -1 if body.logprobs is None else body.logprobs
    assert isinstance(body, ChatBody)
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("`top_logprobs` requires `logprobs`", "top_logprobs")
    return -1


def _logit_bias(body: GenerationBody, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    bias = []
    for key, value in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 10:
            raise RequestError(f"`logit_bias`: {key[:32]!r} is not a token id", "logit_bias")
        bias.append((_check_token_id(int(key), "logit_bias", tokenizer), value))
    return tuple(bias)


def _stop_ids(body: GenerationBody, tokenizer: Tokenizer) -> tuple[int, ...]:
    own = () if body.ignore_eos else tokenizer.eos_ids
    requested = [
        _check_token_id(token, "stop_token_ids", tokenizer) for token in body.stop_token_ids or ()
    ]
    ids = tuple(dict.fromkeys((*own, *requested)))
    if len(ids) > MAX_STOP_IDS:
        maximum = MAX_STOP_IDS - len(own)
        raise RequestError(f"`stop_token_ids`: at most {maximum}", "stop_token_ids")
    return ids


def _check_token_id(token: int, field: str, tokenizer: Tokenizer) -> int:
    if token >= tokenizer.vocab_size:
        raise RequestError(
            f"`{field}`: token {token} is out of range; the model has {tokenizer.vocab_size}", field
        )
    return token


def _stop_strings(body: GenerationBody) -> tuple[str, ...]:
    stop = body.stop or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _max_tokens(body: GenerationBody, loaded_model: LoadedModel, prompt: int) -> int:
    """Return the token limit of an answer to a prompt of ``prompt`` tokens."""
    max_model_len = loaded_model.model.max_model_len
    field = "messages" if isinstance(body, ChatBody) else "prompt"
    if prompt >= max_model_len:
        raise ContextTooLong(
            f"`{field}`: the prompt has {prompt} tokens, which exceeds the context of "
            f"{loaded_model.model.name} ({max_model_len} tokens including the answer)",
            field,
        )
    requested, field = body.max_completion_tokens, "max_completion_tokens"
    if requested is None:
        requested, field = body.max_tokens, "max_tokens"
    if requested == 0:
        raise RequestError(f"`{field}`: must be at least 1, or -1 for as many as fit", field)
    if requested is None or requested < 0:
        default = None
        if requested is None:
            limit = loaded_model.tokenizer.defaults.max_new_tokens
            default = COMPLETION_MAX_TOKENS if isinstance(body, CompletionBody) else limit
        if prompt <= loaded_model.model.original_max_model_len // 2:
            # The default limit should not switch a short prompt to the long-context embeddings.
            max_model_len = min(max_model_len, loaded_model.model.original_max_model_len)
        return min(default or max_model_len, max_model_len - prompt)
    return min(requested, max_model_len - prompt)


def _derived_seed(seed: int, copy: int) -> int:
    """Derive a seed for each of ``n`` answers; the first keeps the request's (splitmix64)."""
    if copy == 0:
        return seed
    mixed = (seed + copy * 0x9E3779B97F4A7C15) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) & _SEED_MASK
