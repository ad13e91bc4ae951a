"""A client of an OpenAI-compatible endpoint that timestamps every piece of an answer.

The server's tokenizer is unknown. Two probes of known length measure the tokens per word and the
overhead of the chat template; prompts are sized by these.
"""

import random
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import msgspec

from molink.bench.answer_stream import AnswerStream, ReportedUsage, error_message
from molink.bench.report import Sample
from molink.bench.runner import Clock
from molink.bench.workload import PlannedRequest
from molink.errors import MolinkError, Unavailable, UsageError

_WORD_LIST = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher force education"
)
#: Words that are one token each in most English tokenizers.
WORDS = tuple(_WORD_LIST.split())

#: Number of words in the two probes.
SHORT_PROBE = 8
LONG_PROBE = 72


@dataclass(frozen=True, slots=True)
class Calibration:
    """Linear model of a prompt's tokens by its words. The default suits large vocabularies."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    @classmethod
    def from_probes(cls, short_tokens: int, long_tokens: int) -> "Calibration":
        """Fit the model to the server's token counts of the short and the long probe."""
        slope = (long_tokens - short_tokens) / (LONG_PROBE - SHORT_PROBE)
        if slope <= 0:
            return cls()
        return cls(slope, max(0.0, short_tokens - slope * SHORT_PROBE))

    def words_for_tokens(self, tokens: int) -> int:
        """Return the number of words in a prompt of about ``tokens`` tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.tokens_per_word))


def make_prompt(words: int, seed: int) -> str:
    """Draw ``words`` random words with ``seed``. Prompts of different seeds share no prefix."""
    source = random.Random(seed)
    return " ".join(source.choices(WORDS, k=words))


BenchRoute = Literal["chat", "completions"]

#: Connect timeout, and maximum silence before a request counts as failed, in seconds.
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """The server to measure. ``url`` is the server's root or its ``/v1``."""

    url: str
    api: BenchRoute = "chat"
    model: str | None = None
    api_key: str | None = None
    ignore_eos: bool = True

    def route_url(self, path: str) -> str:
        """Return the URL of a route below ``/v1``."""
        root = self.url.rstrip("/").removesuffix("/v1")
        return f"{root}/v1/{path}"


class _ModelCard(msgspec.Struct, frozen=True):
    id: str


class _ModelList(msgspec.Struct, frozen=True):
    data: list[_ModelCard]


class _Answer(msgspec.Struct, frozen=True):
    usage: ReportedUsage | None = None


class BenchClient:
    """A connection pool to one endpoint; an async context manager.

    ``calibration`` sizes the prompts; :meth:`calibrate_prompts` measures it on the server.
    """

    def __init__(self, target: BenchTarget, clock: Clock, seed: int = 0) -> None:
        self._target = target
        self._clock = clock
        self._seed = seed
        self._session: aiohttp.ClientSession | None = None
        self.model = target.model or ""
        self.calibration = Calibration()

    async def __aenter__(self) -> Self:
        headers = {"Accept": "text/event-stream, application/json"}
        if self._target.api_key:
            headers["Authorization"] = f"Bearer {self._target.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=headers,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S
            ),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._open_session.close()

    async def calibrate_prompts(self) -> bool:
        """Choose the model unless one was given, and measure how many tokens a word takes.

        Returns whether the server reports token counts (``usage``). Without them, prompt sizes are
        estimates.

        Raises:
            Unavailable: the server can't be reached.
            UsageError: the server rejects the model, the key or a parameter.
        """
        if not self.model:
            self.model = await self._first_model()
        short = await self._count_probe_tokens(SHORT_PROBE)
        long = await self._count_probe_tokens(LONG_PROBE)
        if not short or not long:
            return False
        self.calibration = Calibration.from_probes(short, long)
        return True

    async def send(self, request: PlannedRequest) -> Sample:
        """Send one request and time its answer. A failure is recorded in the sample."""
        words = self.calibration.words_for_tokens(request.input_tokens)
        prompt = make_prompt(words, hash((self._seed, request.index)))
        body = self._request_body(prompt, request.output_tokens)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        sent_at = self._clock.now()
        try:
            return await self._stream_answer(body, sent_at)
        except (MolinkError, aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            return Sample(sent_at=sent_at, finished_at=self._clock.now(), error=reason)

    async def _stream_answer(self, body: dict[str, Any], sent_at: float) -> Sample:
        async with self._open_session.post(self._completions_url, json=body) as response:
            if response.status != 200:
                raise Unavailable(await _describe_refusal(response))
            stream = AnswerStream(sent_at)
            async for data in response.content.iter_any():
                stream.feed_data(data, self._clock.now())
            return stream.to_sample()

    async def _first_model(self) -> str:
        data = await self._fetch("GET", self._target.route_url("models"))
        try:
            models = msgspec.json.decode(data, type=_ModelList).data
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"{self._target.route_url('models')} is not an OpenAI-compatible endpoint: {error}"
            ) from error
        if not models:
            raise Unavailable(f"{self._target.url} serves no model yet")
        return models[0].id

    async def _count_probe_tokens(self, words: int) -> int:
        body = self._request_body(make_prompt(words, seed=words), 1)
        data = await self._fetch("POST", self._completions_url, body)
        try:
            usage = msgspec.json.decode(data, type=_Answer).usage
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"{self._completions_url} did not return an OpenAI-compatible answer: {error}"
            ) from error
        return usage.prompt_tokens if usage else 0

    async def _fetch(self, method: str, url: str, body: dict[str, Any] | None = None) -> bytes:
        try:
            async with self._open_session.request(method, url, json=body) as response:
                if response.status == 200:
                    return await response.read()
                refusal = await _describe_refusal(response)
                status = response.status
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise UsageError(
                f"--url {self._target.url} is not an http:// or https:// URL"
            ) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(
                f"can't reach {url}: {reason}. Is the server running, and is --url right?"
            ) from error
        if "ignore_eos" in refusal:
            refusal += " (use --no-ignore-eos to omit it)"
        if status >= 500:
            raise Unavailable(f"{url} returned {refusal}")
        raise UsageError(f"{url} returned {refusal}")

    def _request_body(self, prompt: str, output_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": output_tokens, "temperature": 0}
        if self._target.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self._target.ignore_eos:
            body["ignore_eos"] = True
        return body

    @property
    def _completions_url(self) -> str:
        return self._target.route_url(
            "chat/completions" if self._target.api == "chat" else "completions"
        )

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside its context"
        return self._session


async def _describe_refusal(response: aiohttp.ClientResponse) -> str:
    """Return ``HTTP 400: message of the server``; reads a bounded part of the body."""
    body = await response.content.read(4096)
    try:
        envelope = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        text = body.decode("utf-8", "replace").strip()
    else:
        text = error_message(envelope.get("error", envelope) if isinstance(envelope, dict) else "")
    return f"HTTP {response.status}: {text[:500] or response.reason}"
