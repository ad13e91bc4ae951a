"""An endpoint's backend that is a whole ring in this process: head, stages on torch, sampler."""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import pairwise
from pathlib import Path

from molink.checkpoint.folder import ModelFolder
from molink.errors import Unavailable
from molink.ring.work import Segment, StepDone
from molink.scheduler.limits import HeadLimits
from molink.scheduler.request import Emission, HeadRequest
from molink.sim.agenda import Agenda
from molink.stage.stage import Stage
from molink.swarm.frontend.generation import GeneratedToken, GenerationRequest
from molink.text.matcher import Grammars
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.serving import Rejected, Token
from molinkd.api.backend import Figures, ServedModel
from molinkd.worker.request_table import RequestTable
from molinkd.worker.step import run_step
from tests.support.rings import Stages, VirtualRing, WholeLink

BLOCK_SIZE = 16


class Computes:
    """Runs each step at once; it ends later."""

    def __init__(self, agenda: Agenda, stage: Stage, requests: RequestTable) -> None:
        self._agenda, self._stage, self._requests = agenda, stage, requests

    async def status(self) -> bytes:
        return b"{}"

    def submit(self, segments: Sequence[Segment], done: Callable[[StepDone], None]) -> None:
        results = run_step(self._stage, self._requests, segments)
        self._agenda.at(self._agenda.now + 0.001, done, StepDone(results, 0.001, None))


class RingBackend:
    """Implements :class:`molinkd.api.backend.Backend`; answers come one after the other."""

    def __init__(
        self, folder: Path, blocks: int = 256, draft_tokens: int = 0, parts: int = 1
    ) -> None:
        """A ring of ``parts`` stages; of several, volumes of drafts may go ahead."""
        opened = ModelFolder.open(folder)
        config = opened.config
        self.folder, self.context = folder, min(config.context, blocks * BLOCK_SIZE)
        self.tokenizer = Tokenizer.open(folder)
        cuts = [config.layers * part // parts for part in range(parts + 1)]
        stages = [Stage.load(opened, layers, "cpu", "f32") for layers in pairwise(cuts)]
        tables = [RequestTable() for _ in stages[1:]]
        tables.append(RequestTable(Grammars(folder, config.vocab_size)))
        agenda = Agenda()
        for stage in stages:
            stage.allocate(blocks, BLOCK_SIZE)
        limits = HeadLimits(
            blocks,
            BLOCK_SIZE,
            1,
            chunk_tokens=256,
            max_context=self.context,
            draft_tokens=draft_tokens,
            ahead=4 * (parts > 1),
        )
        self.ring = VirtualRing(
            limits,
            [Computes(agenda, *pair) for pair in zip(stages, tables, strict=True)],
            [WholeLink(agenda) for _ in stages] if parts > 1 else [],
            Stages(config.hidden_size, config.vocab_size, "f32"),
            lambda index: tables[index],
            agenda,
        )
        self.ring.on_emission = self._keep
        self._told: dict[str, deque[Token | Rejected]] = {}
        self.asked: list[GenerationRequest] = []

    def _keep(self, emission: Emission, now: float) -> None:
        self._told[emission.message.key].append(emission.message)

    def models(self) -> Sequence[ServedModel]:
        return [ServedModel("tiny", self.folder, self.context, 1700000000)]

    def ready(self, model: str | None = None) -> bool:
        return True

    def metrics(self) -> Figures:
        return Figures()

    def submit(self, request: GenerationRequest, emitted: Sequence[int] = ()) -> str:
        """Ask for an answer, of which ``emitted`` is known already; returns its key."""
        self.asked.append(request)
        key = str(len(self.asked))
        self._told[key] = deque()
        prompt = tuple(request.prompt)
        asked = HeadRequest(
            "d",
            key,
            (*prompt, *emitted),
            len(prompt),
            request.max_tokens - len(emitted),
            request.sampling,
            request.stop_ids,
            1 << 16,
            request.grammar,
        )
        self.ring.head.submit(asked, self.ring.agenda.now)
        self.ring.rings[0].pump()
        return key

    def tokens(self, key: str) -> list[Token | Rejected]:
        """All that is told of it, to its end."""
        told = self._told[key]
        while not told or (isinstance(told[-1], Token) and told[-1].finish is None):
            assert self.ring.agenda.step(), "nothing happens any more"
        return list(told)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GeneratedToken, None]:
        for told in self.tokens(self.submit(request)):
            if isinstance(told, Rejected):
                raise Unavailable(told.message)
            yield GeneratedToken(
                told.position, told.token, told.logprob, told.top, told.finish, told.cached
            )
