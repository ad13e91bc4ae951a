"""A scripted backend, and a tiny model folder for its tokenizer."""

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from molink.checkpoint.model_task import GENERATE, ModelTask
from molink.swarm.frontend.generated_token import GeneratedToken
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import Request
from molinkd.api.backend import MetricValues, ServedModel, StageLabels, StageMetricValues

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CONTEXT = 512


def build_model(
    folder: Path, template: object = TEMPLATE, special: Sequence[str] = (), eos: str = "<|end|>"
) -> Path:
    """Write a byte-level BPE tokenizer with a chat template, but no weights.

    ``template`` may be a list of named ones; ``special`` are further special tokens.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|end|>", *special],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox says hello world to you"] * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _check(request: Request) -> None:
    """Fail on parameters that a scheduler would refuse."""
    msgspec.msgpack.decode(msgspec.msgpack.encode(request.sampling_params), type=SamplingParams)


@dataclass
class FakeBackend:
    """Answers every prompt with ``answer``; its attributes script failures and pauses."""

    folder: Path
    answer: str = "Hello there, naïve 🦊 world!"
    #: Token ids of the answer, in place of ``answer``.
    tokens: Sequence[int] | None = None
    #: Raised before token ``fail_at``.
    error: Exception | None = None
    fail_at: int = 0
    #: With a gate, each ``gate.release()`` lets one token pass.
    gate: asyncio.Semaphore | None = None
    ready_now: bool = True
    context: int = CONTEXT
    short_context: int = 0
    name: str = "tiny"
    task: ModelTask = GENERATE
    hidden_size: int = 0
    adapters: tuple[str, ...] = ()
    parameters: int = 0
    quantization: str = ""
    sees_images: bool = False
    #: Further served models with the same tokenizer.
    others: Sequence[ServedModel] = ()
    #: The result of ``molink status --json``, and the number of calls.
    swarm: dict[str, object] = field(default_factory=dict)
    status_asked: int = 0
    requests: list[Request] = field(default_factory=list)
    running: int = 0
    #: Number of tokens sent so far.
    given: int = 0
    closed: int = 0
    #: Set when a generation begins or ends.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: The endpoint's event loop, after its first call.
    loop: asyncio.AbstractEventLoop | None = None
    tokenizer: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer.open(self.folder)

    def list_models(self) -> Sequence[ServedModel]:
        return [
            ServedModel(
                self.name,
                self.folder,
                self.context,
                1700000000,
                self.short_context,
                task=self.task,
                hidden_size=self.hidden_size,
                adapters=self.adapters,
                parameters=self.parameters,
                quantization=self.quantization,
                sees_images=self.sees_images,
            ),
            *self.others,
        ]

    def is_ready(self, model: str | None = None) -> bool:
        return self.ready_now

    def collect_metrics(self) -> MetricValues:
        stages = {
            StageLabels.for_stage("p1", (0, 3), 0, 2): StageMetricValues(
                {}, {"scheduler_blocks_free": 7.0}
            ),
            StageLabels.for_stage("p1", (3, 6), 1, 2): StageMetricValues(
                {"link_sent_bytes_total": 5.0, "link_received_bytes_total": 6.0},
                {"scheduler_blocks_free": 8.0, "stage_requests": 2.0},
            ),
        }
        return MetricValues({"recoveries": 3.0}, {"odd name": 1.0}, stages)

    async def fetch_status(self) -> bytes:
        self.status_asked += 1
        return json.dumps(self.swarm).encode()

    async def generate(self, request: Request) -> AsyncGenerator[GeneratedToken, None]:
        _check(request)
        self.requests.append(request)
        self.loop = asyncio.get_running_loop()
        self.running += 1
        self.changed.set()
        try:
            ids = self.tokens if self.tokens is not None else self.tokenizer.encode(self.answer)
            eos = self.tokenizer.eos_ids[0]
            script = [*ids, eos] if eos in request.stop_token_ids else list(ids) * 50
            for number, token in enumerate(script):
                if self.gate is not None:
                    await self.gate.acquire()
                if self.error is not None and number == self.fail_at:
                    raise self.error
                self.given += 1
                self.changed.set()
                yield self._token(request, number, token)
                if number + 1 == request.max_tokens:
                    return
        finally:
            self.running -= 1
            self.closed += 1
            self.changed.set()

    async def until_running(self, count: int) -> None:
        """Wait until ``count`` generations are running."""
        while self.running != count:
            self.changed.clear()
            await self.changed.wait()

    async def until_given(self, count: int) -> None:
        """Wait until ``count`` tokens have been sent."""
        while self.given < count:
            self.changed.clear()
            await self.changed.wait()

    def _token(self, request: Request, number: int, token: int) -> GeneratedToken:
        finish = None
        if token in request.stop_token_ids:
            finish = "stop"
        elif number + 1 == request.max_tokens:
            finish = "length"
        size = next(one.hidden_size for one in self.list_models() if one.name == request.model)
        given = request.sampling_params.logprob_token_ids
        likeliest = ((token, -0.5), (65, -1.5), (66, float("-inf")))
        return GeneratedToken(
            position=len(request.prompt_token_ids) + number,
            token=token,
            logprob=-0.5,
            top=self.score(request) if given else likeliest[: request.sampling_params.logprobs + 1],
            finish_reason=finish,
            cached_tokens=3 if number == 0 else 0,
            pooled=self.row(request.prompt_token_ids, size) if size else b"",
        )

    def row(self, ids: Sequence[int], size: int) -> bytes:
        """The embedding of a prompt."""
        numbers = [1 + (sum(ids) * place) % 7 for place in range(1, size + 1)]
        return array("f", numbers).tobytes()

    def score(self, request: Request) -> tuple[tuple[int, float], ...]:
        """Logprobs of the requested tokens: the longer the prompt, the less relevant."""
        relevant, irrelevant = request.sampling_params.logprob_token_ids
        return (irrelevant, -1.0), (relevant, -len(request.prompt_token_ids) / 100)
