"""An endpoint's backend that is a whole ring in this process: scheduler, torch stages, sampler."""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import pairwise
from pathlib import Path

from molink.checkpoint.model_folder import ModelFolder
from molink.errors import Unavailable
from molink.ring.step import StepInput, StepResult
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.request_state import Emission, RequestState
from molink.sim.event_queue import EventQueue
from molink.stage.stage import Stage
from molink.swarm.frontend.generated_token import GeneratedToken
from molink.text.grammar_matcher import GrammarCompiler
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.serving import OutputToken, Rejected, Request
from molinkd.api.backend import MetricValues, ServedModel
from molinkd.worker.request_table import RequestTable
from molinkd.worker.step import run_step
from tests.support.rings import Stages, VirtualRing, WholeLink

BLOCK_SIZE = 16


class Computes:
    """Runs each step at once; it ends later."""

    def __init__(self, queue: EventQueue, stage: Stage, requests: RequestTable) -> None:
        self._event_queue, self._stage, self._requests = queue, stage, requests

    async def fetch_status(self) -> bytes:
        return b"{}"

    def submit_step(
        self, segments: Sequence[StepInput], done: Callable[[StepResult], None]
    ) -> None:
        results = run_step(self._stage, self._requests, segments)
        self._event_queue.schedule_at(
            self._event_queue.now + 0.001, done, StepResult(results, 0.001, None)
        )


class RingBackend:
    """Implements :class:`molinkd.api.backend.Backend`; answers come one after the other."""

    def __init__(
        self,
        folder: Path,
        blocks: int = 256,
        num_speculative_tokens: int = 0,
        parts: int = 1,
        slots: int = 64,
    ) -> None:
        """A ring of ``parts`` stages; of several, volumes of drafts may go ahead."""
        opened = ModelFolder.open(folder)
        config = self._config = opened.config
        self._adapters = tuple(adapter.name for adapter in config.adapters)
        self.folder, self.context = folder, min(config.max_model_len, blocks * BLOCK_SIZE)
        self.tokenizer = Tokenizer.open(folder)
        cuts = [config.layers * part // parts for part in range(parts + 1)]
        stages = [Stage.load_layers(opened, layers, "cpu", "f32") for layers in pairwise(cuts)]
        tables = [RequestTable() for _ in stages[1:]]
        grammars = GrammarCompiler(folder, config.vocab_size) if config.has_output_head else None
        tables.append(RequestTable(grammars))
        queue = EventQueue()
        for stage in stages:
            stage.allocate_kv_pool(blocks, BLOCK_SIZE)
        limits = SchedulerConfig(
            blocks,
            BLOCK_SIZE,
            1,
            max_num_batched_tokens=256,
            max_num_seqs=slots,
            max_model_len=self.context,
            num_speculative_tokens=num_speculative_tokens,
            lookahead_volumes=4 * (parts > 1),
        )
        self.ring = VirtualRing(
            limits,
            [Computes(queue, *pair) for pair in zip(stages, tables, strict=True)],
            [WholeLink(queue) for _ in stages] if parts > 1 else [],
            Stages(config.hidden_size, config.vocab_size, "f32"),
            lambda index: tables[index],
            queue,
        )
        self.ring.on_emission = self._keep
        self._told: dict[str, deque[OutputToken | Rejected]] = {}
        #: The row of each embedding, by key.
        self._pooled: dict[str, bytes] = {}
        self.asked: list[Request] = []

    def _keep(self, emission: Emission, now: float) -> None:
        key = emission.message.key
        self._told[key].append(emission.message)
        if emission.pooled is not None:
            self._pooled[key] = emission.pooled

    def list_models(self) -> Sequence[ServedModel]:
        return [
            ServedModel(
                "tiny",
                self.folder,
                self.context,
                1700000000,
                task=self._config.task,
                hidden_size=self._config.hidden_size,
                adapters=self._adapters,
            )
        ]

    def is_ready(self, model: str | None = None) -> bool:
        return True

    def collect_metrics(self) -> MetricValues:
        return MetricValues()

    def submit(self, request: Request, emitted: Sequence[int] = ()) -> str:
        """Submit a request, of whose answer ``emitted`` is known already; returns its key."""
        self.asked.append(request)
        key = str(len(self.asked))
        self._told[key] = deque()
        adapter = self._adapters.index(request.adapter) + 1 if request.adapter else 0
        state = RequestState.from_request(
            request, "d", key, emitted, credit_window=1 << 16, adapter=adapter
        )
        self.ring.scheduler.submit_request(state, self.ring.queue.now)
        self.ring.rings[0].run_pending()
        return key

    def tokens(self, key: str) -> list[OutputToken | Rejected]:
        """All its tokens, to the end."""
        told = self._told[key]
        while not told or (isinstance(told[-1], OutputToken) and told[-1].finish_reason is None):
            assert self.ring.queue.run_next(), "nothing happens any more"
        return list(told)

    async def generate(self, request: Request) -> AsyncGenerator[GeneratedToken, None]:
        key = self.submit(request)
        for told in self.tokens(key):
            if isinstance(told, Rejected):
                raise Unavailable(told.message)
            yield GeneratedToken(
                told.position,
                told.token,
                told.logprob,
                told.top,
                told.finish_reason,
                told.cached_tokens,
                self._pooled.get(key, b""),
            )
