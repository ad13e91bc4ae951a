"""Simulated clients: send requests on time and record when each token arrives."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from molink.bench.report import Sample
from molink.bench.workload import PlannedRequest
from molink.errors import InvariantError, MolinkError
from molink.scheduler.request_state import Emission, RequestState
from molink.scheduler.scheduler import Scheduler
from molink.sim.event_queue import EventQueue
from molink.sim.known_text import END_TOKEN, KnownText, tokens_of
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import OutputToken, Request

#: Clients grant credit for all tokens in advance, so streams never stall.
_CREDIT_WINDOW = 1 << 24
_PEER = "clients"


class ServingRing(Protocol):
    """A ring that serves requests."""

    @property
    def scheduler(self) -> Scheduler: ...

    def issue_batches(self) -> None:
        """Issue batches after a new request."""


#: Chooses the ring of a request; ``None`` keeps the request waiting.
ChooseRing = Callable[[PlannedRequest], ServingRing | None]


class Clients:
    """Sends ``plan`` to the rings that ``choose`` selects, and records the time of every token.

    It receives the schedulers' emissions, and stops ``event_queue`` after the last one. Prompts
    share content only if ``texts`` or the trace define it.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        plan: Iterable[PlannedRequest],
        choose: ChooseRing,
        texts: Sequence[KnownText] = (),
    ) -> None:
        self._event_queue = event_queue
        self._choose_ring = choose
        self._texts = texts
        self._plan = {str(request.index): request for request in plan}
        self._times: dict[str, array[float]] = {key: array("d") for key in self._plan}
        self._errors: dict[str, str] = {}
        #: The ring of each live request; ``None`` while the request waits.
        self._serving: dict[str, ServingRing | None] = {}
        self.num_unfinished = len(self._plan)
        #: Time of the last token, or of the first request after an idle period.
        self.last_event_at = 0.0
        self._live_since = 0.0
        #: Seconds with live requests.
        self.live_s = 0.0
        #: Called with the ring, key, generated tokens and time of each ended request.
        self.on_finished: Callable[[ServingRing | None, str, int, float], None] | None = None
        #: Called with the key, cached prompt tokens and time of a request's first token.
        self.on_first_token: Callable[[str, int, float], None] | None = None

    def start(self) -> None:
        """Schedule all requests."""
        for key, request in self._plan.items():
            self._event_queue.schedule_at(request.arrival_s, self._send_request, key)

    def _send_request(self, key: str) -> None:
        now = self._event_queue.now
        if not self._serving:
            self._live_since = self.last_event_at = now
        self._serving[key] = None
        self._submit_request(key)

    def _submit_request(self, key: str) -> None:
        """Submit the prompt with the tokens generated so far."""
        planned, now = self._plan[key], self._event_queue.now
        serving = self._serving[key] = self._choose_ring(planned)
        if serving is None:
            return
        there = len(self._times[key])
        count = planned.input_tokens
        ids = self._token_ids(planned, count + there)
        request = Request(
            model="",
            prompt_token_ids=ids[:count],
            max_tokens=planned.max_tokens or planned.output_tokens,
            # Simulated stages derive tokens from the seed.
            sampling_params=SamplingParams(
                temperature=0.0, seed=planned.index if self._texts else planned.last_position
            ),
            stop_token_ids=() if self._texts else (END_TOKEN,),
        )
        state = RequestState.from_request(
            request, _PEER, key, ids[count:], credit_window=_CREDIT_WINDOW
        )
        try:
            emissions = serving.scheduler.submit_request(state, now)
        except MolinkError as error:
            self._finish_request(key, now, str(error))
        else:
            self.deliver_emissions(emissions, now)
            serving.issue_batches()

    def _token_ids(self, planned: PlannedRequest, count: int) -> tuple[int, ...]:
        """Return the first ``count`` tokens of prompt and answer."""
        if not self._texts:
            return tokens_of(planned, count)
        text = self._texts[planned.index % len(self._texts)]
        return (*text.prompt, *text.answer)[:count]

    def prompt_tokens(self, planned: PlannedRequest) -> tuple[int, ...]:
        return self._token_ids(planned, planned.input_tokens)

    def detach_ring(self, serving: ServingRing) -> list[str]:
        """Detach the requests of an ended ring; return their keys for :meth:`resend_requests`."""
        lost = [key for key, other in self._serving.items() if other is serving]
        for key in lost:
            self._serving[key] = None
        return lost

    def resend_requests(self, keys: Iterable[str]) -> None:
        """Submit detached requests again."""
        for key in keys:
            if key in self._serving and self._serving[key] is None:
                self._submit_request(key)

    @property
    def waiting_keys(self) -> list[str]:
        """Keys of requests without a ring."""
        return [key for key, serving in self._serving.items() if serving is None]

    @property
    def silence_s(self) -> float:
        """Seconds since the last token of any live request."""
        return self._event_queue.now - self.last_event_at if self._serving else 0.0

    def deliver_emissions(self, emissions: Iterable[Emission], now: float) -> None:
        """Record tokens and rejections.

        Raises:
            InvariantError: a token is repeated, missing or wrong.
        """
        self.last_event_at = now
        for emission in emissions:
            message = emission.message
            if isinstance(message, OutputToken):
                times = self._times[message.key]
                if message.position != self._plan[message.key].input_tokens + len(times):
                    raise InvariantError(f"request {message.key}: position {message.position}")
                if self._texts and message.token != self._expected_token(message):
                    raise InvariantError(f"request {message.key}: wrong token")
                times.append(now)
                if self.on_first_token is not None and len(times) == 1:
                    self.on_first_token(message.key, message.cached_tokens, now)
                if message.finish_reason is not None:
                    self._finish_request(message.key, now)
            else:
                self._finish_request(message.key, now, message.message)

    def _expected_token(self, message: OutputToken) -> int:
        text = self._texts[self._plan[message.key].index % len(self._texts)]
        return text.token_at(message.position)

    def close(self) -> None:
        """Do nothing: requests outlive their ring."""

    def _finish_request(self, key: str, now: float, error: str | None = None) -> None:
        self.num_unfinished -= 1
        serving = self._serving.pop(key)
        if not self._serving:
            self.live_s += now - self._live_since
        if error is not None:
            self._errors[key] = error
        if self.on_finished is not None:
            self.on_finished(serving, key, len(self._times[key]), now)
        if self.num_unfinished == 0:
            self._event_queue.stop()

    def collect_samples(self, since: float) -> list[Sample]:
        """Return samples of the requests that were due at ``since`` seconds or later."""
        return [
            self._make_sample(key, request)
            for key, request in self._plan.items()
            if request.arrival_s >= since
        ]

    def _make_sample(self, key: str, request: PlannedRequest) -> Sample:
        times = tuple(self._times[key])
        error = self._errors.get(key)
        if error is None and len(times) != request.output_tokens:
            error = f"{len(times)} of {request.output_tokens} tokens when the simulation ended"
        return Sample(
            request.arrival_s,
            times,
            times[-1] if times else request.arrival_s,
            request.input_tokens,
            len(times),
            error,
        )
