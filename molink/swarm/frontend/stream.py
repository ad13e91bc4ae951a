"""The endpoint's side of a request, which it resubmits after every loss.

The endpoint holds the request and all emitted tokens. Recovery is always the same: submit prompt
and emitted tokens to the scheduler of the new epoch. A position is emitted once and never changes.
Sans-IO: it takes events and ``now``, and returns actions.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from molink.errors import (
    ContextTooLong,
    InvariantError,
    MolinkError,
    Overloaded,
    RequestError,
    Unavailable,
)
from molink.swarm.frontend.generated_token import GeneratedToken
from molink.swarm.frontend.pixel_sender import PixelSender
from molink.wire.messages.base import Payload
from molink.wire.messages.serving import (
    Cancel,
    Credit,
    OutputToken,
    PixelFragment,
    PixelsReceived,
    PooledOutput,
    Rejected,
    Request,
    Submit,
)

StreamState = Literal["waiting", "running", "done"]


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds of waits (seconds) and retries."""

    #: Maximum wait for a pipeline while none is being formed, or its formation makes no progress.
    #: Broken connections don't restart this wait.
    pipeline_wait_timeout: float = 30.0
    #: Maximum wait despite progress, and from the first loss to a token if losses repeat.
    max_wait_s: float = 600.0
    #: Maximum tokens that a scheduler may be ahead of the client.
    credit_window: int = 256
    #: Maximum epochs that may end before they return a token of the request, and maximum failures
    #: that a scheduler may report, so that a request that crashes every pipeline ends.
    max_failed_attempts: int = 4
    #: Pause before a resubmission to the same scheduler.
    retry_delay_s: float = 0.25
    #: Seconds after which a request at a scheduler counts as being served, so that its next wait is
    #: a new one.
    min_service_s: float = 2.0


@dataclass(frozen=True, slots=True)
class PipelineEpoch:
    """A pipeline that accepts requests, with its current epoch."""

    pipeline: str
    epoch: int


@dataclass(frozen=True, slots=True)
class SubmitAction:
    """Submit to the scheduler of ``target``: message, grammar as payload, and ids."""

    target: PipelineEpoch
    submit: Submit
    token_ids: tuple[int, ...]
    grammar: bytes | None = None


@dataclass(frozen=True, slots=True)
class SendToSchedulerAction:
    """Send a short message to the scheduler of ``target``."""

    target: PipelineEpoch
    message: Cancel | Credit


@dataclass(frozen=True, slots=True)
class SendPixelsAction:
    """Send pixels of the request's images to the scheduler of ``target``."""

    target: PipelineEpoch
    fragment: PixelFragment
    data: memoryview


@dataclass(frozen=True, slots=True)
class EmitTokenAction:
    """Emit a token to the client."""

    token: GeneratedToken


@dataclass(frozen=True, slots=True)
class FailStreamAction:
    """End the client's stream with an error."""

    error: MolinkError


StreamAction = (
    SubmitAction | SendToSchedulerAction | SendPixelsAction | EmitTokenAction | FailStreamAction
)


class RequestStream:
    """State machine of one request. Keys of its submissions are ``<key>.<attempt>``."""

    def __init__(
        self,
        key: str,
        request: Request,
        limits: StreamLimits,
        now: float,
        unserved_since: float | None = None,
    ) -> None:
        """``unserved_since`` is the time when the last pipeline of its model was lost, if none is
        left.

        The time that earlier requests have already waited since then counts.
        """
        self.key = key
        self.request = request
        self.state: StreamState = "waiting"
        self._limits = limits
        self._prompt = request.prompt_token_ids
        #: All emitted tokens, in order; append only.
        self._emitted: list[int] = []
        #: Pixels of the current submission.
        self._pixels = PixelSender("", ())
        #: An embedding model's row; its token follows.
        self._pooled = b""
        self._num_consumed = 0
        self._num_credited = 0
        #: Tokens that the current scheduler may be ahead of the client.
        self._window = limits.credit_window
        #: Number of tokens that schedulers may have sent so far.
        self._num_granted = 0
        self._attempt = 0
        #: Target of the last submission; ``None`` before the first.
        self._submitted: PipelineEpoch | None = None
        #: An abandoned submission that its scheduler may still serve.
        self._abandoned: tuple[PipelineEpoch, str] | None = None
        self._target: PipelineEpoch | None = None
        #: Start of the current wait; ``None`` if a token has arrived since.
        self._waiting_since: float | None = now if unserved_since is None else unserved_since
        #: When the client sent the request, from which queue time and deadline count.
        self._started_at = now
        self._submitted_at = now
        self._retry_at = now
        #: Progress of the pipeline that is being formed (0: none), and the time of its last change.
        self._formation_progress = 0
        self._progress_at = now if unserved_since is None else unserved_since
        self._failed_attempts = 0
        #: Whether the last submission was the first in its epoch.
        self._is_first_in_epoch = True
        #: Target that was lost before a token; ``None`` if counted or recovered.
        self._lost_target: PipelineEpoch | None = None
        #: Time of the first such loss since the last token.
        self._lost_at: float | None = None
        self._last_reason = "no pipeline serves this model"
        self._transitions: deque[str] = deque(maxlen=32)

    @property
    def attempt_key(self) -> str:
        """Key of the current submission."""
        return f"{self.key}.{self._attempt}"

    @property
    def is_waiting(self) -> bool:
        """Whether the request waits for a pipeline or a first token."""
        return self.state != "done" and self._waiting_since is not None

    @property
    def next_wake_at(self) -> float | None:
        """Return when to call :meth:`wake`; ``None`` if there is nothing to wait for."""
        if self.state != "waiting":
            return None
        return self._deadline if self._target is None else min(self._deadline, self._retry_at)

    @property
    def _deadline(self) -> float:
        since, limits = self._waiting_since, self._limits
        assert since is not None
        hopeful = max(since, self._progress_at) + limits.pipeline_wait_timeout
        first = since if self._lost_at is None else self._lost_at
        latest = min(hopeful, first + max(limits.pipeline_wait_timeout, limits.max_wait_s))
        most = self._max_queue_s
        return min(latest, self._started_at + most) if most else latest

    @property
    def _max_queue_s(self) -> float:
        """Seconds that the request may wait for admission; 0 if it has tokens or no bound."""
        return 0.0 if self._emitted else self.request.max_queue_s

    @property
    def _has_no_failures(self) -> bool:
        """Whether nothing has failed since the last token."""
        return self._failed_attempts == 0 and self._lost_at is None

    def on_formation_progress(self, progress: int, now: float) -> None:
        """Handle the ``progress`` of a formation: a changed number is progress, 0 means no
        formation.
        """
        if progress and progress != self._formation_progress:
            self._progress_at = now
        self._formation_progress = progress

    def set_unserved_reason(self, reason: str) -> None:
        """Store why there is no pipeline, for later errors."""
        if self.state == "waiting":
            self._last_reason = reason

    def set_target(self, target: PipelineEpoch | None, now: float) -> list[StreamAction]:
        """Set the current target; ``None`` while there is none."""
        self._target = target
        if self.state == "running" and target != self._submitted:
            self._log_transition(f"lost {self._submitted}")
            self._on_pipeline_lost("the pipeline was interrupted", now)
        return self.wake(now)

    def on_pooled(self, message: PooledOutput, row: bytes) -> None:
        """Keep the row of the next token."""
        if self._is_current(message.key) and self._submitted is not None:
            self._pooled = row if message.epoch == self._submitted.epoch else b""

    def on_pixels_received(self, message: PixelsReceived) -> list[StreamAction]:
        """Send more pixels, since the scheduler has received some."""
        target = self._submitted
        if not self._is_current(message.key) or target is None or message.epoch != target.epoch:
            return []
        return [
            SendPixelsAction(target, *each)
            for each in self._pixels.next_fragments(message.position)
        ]

    def on_token(self, message: OutputToken, now: float) -> list[StreamAction]:
        """Handle a token."""
        if not self._is_current(message.key) or self._submitted is None:
            return []
        if message.epoch != self._submitted.epoch:
            return []
        expected = len(self._prompt) + len(self._emitted)
        if message.position < expected:
            return []
        if message.position > expected:
            return self._retry(f"position {message.position} came, not {expected}", now)
        if len(self._emitted) >= self._num_granted + self._limits.credit_window:
            return self._fail_stream(Unavailable("the pipeline sends more than it was asked for"))
        self._failed_attempts = 0
        self._waiting_since = self._lost_target = self._lost_at = None
        self._emitted.append(message.token)
        out_of_tokens = len(self._emitted) >= self.request.max_tokens
        finish = message.finish_reason or ("length" if out_of_tokens else None)
        token = _to_generated_token(message, finish, self._pooled)
        self._pooled = b""
        actions: list[StreamAction] = [EmitTokenAction(token)]
        if finish is not None:
            if message.finish_reason is None:
                actions += self._cancel_attempt()
            self.state = "done"
        return actions

    def on_rejected(self, message: Rejected, now: float) -> list[StreamAction]:
        """Handle a rejection: the scheduler can't serve the request, or can no longer serve it."""
        if not self._is_current(message.key):
            return []
        self._log_transition(f"rejected: {message.reason}: {message.message}")
        text = message.message
        match message.reason:
            case "overloaded" if not self._emitted and self._has_no_failures:
                return self._fail_stream(Overloaded(text, message.retry_after or 1.0))
            case "too_long":
                return self._fail_stream(ContextTooLong(text, "max_tokens"))
            case "invalid":
                return self._fail_stream(RequestError(text))
            case "failed":
                return self._retry(text, now)
            case _:  # overload or a new epoch in mid-stream is only a pause for the client
                if now - self._submitted_at > self._limits.min_service_s:
                    self._on_pipeline_lost(text, now)
                else:
                    self._enter_waiting(text, now)
                self._retry_at = now + max(self._limits.retry_delay_s, message.retry_after)
                return self.wake(now)

    def on_tokens_consumed(self, count: int) -> list[StreamAction]:
        """Record that the client has consumed ``count`` more tokens."""
        self._num_consumed += count
        if self.state != "running" or self._submitted is None:
            return []
        if self._num_consumed - self._num_credited < max(1, self._window // 4):
            return []
        self._num_credited = self._num_consumed
        self._num_granted = max(self._num_granted, self._num_consumed + self._window)
        position = len(self._prompt) + self._num_consumed
        return [SendToSchedulerAction(self._submitted, Credit(self.attempt_key, position))]

    def cancel(self) -> list[StreamAction]:
        """Cancel the request, since its client has disconnected."""
        actions = self._cancel_attempt() if self.state == "running" else []
        self.state = "done"
        return actions

    def wake(self, now: float) -> list[StreamAction]:
        """Submit if there is a target and the pause is over; fail after too long a wait."""
        if self.state != "waiting":
            return []
        if self._lost_target is not None and self._target not in (None, self._lost_target):
            self._lost_target = None
            # The epoch ended. A broken connection alone costs only time, not an attempt.
            self._failed_attempts += 1
        if self._failed_attempts > self._limits.max_failed_attempts:
            return self._fail_stream(
                Unavailable(f"gave up after {self._failed_attempts} attempts: {self._last_reason}")
            )
        late = bool(self._max_queue_s) and now >= self._started_at + self._max_queue_s
        if self._target is not None and now >= self._retry_at and not late:
            return self._submit(self._target, now)
        if late and self._target is not None:
            text = f"the request was not started within {self._max_queue_s:g} s (`max_queue_time`)"
            return self._fail_stream(Overloaded(text, self._limits.retry_delay_s))
        if now >= self._deadline:
            assert self._waiting_since is not None
            return self._fail_stream(
                Unavailable(
                    f"no pipeline could serve the request for {now - self._waiting_since:.0f} s: "
                    f"{self._last_reason}. See `molink status`."
                )
            )
        return []

    def validate(self) -> None:
        """Check the invariants.

        Raises:
            InvariantError: one doesn't hold.
        """
        if self.state == "running" and self._submitted != self._target:
            raise InvariantError("running on an unavailable target", self._transitions)
        if not self._num_consumed <= len(self._emitted) <= self.request.max_tokens:
            raise InvariantError(
                f"{self._num_consumed} taken, {len(self._emitted)} emitted", self._transitions
            )

    def _submit(self, target: PipelineEpoch, now: float) -> list[StreamAction]:
        actions: list[StreamAction] = []
        if self._abandoned is not None and self._abandoned[0] == target:
            actions.append(SendToSchedulerAction(target, Cancel(self._abandoned[1])))
        self._abandoned = None
        self._attempt += 1
        self._is_first_in_epoch = target != self._submitted
        self._submitted, self._submitted_at = target, now
        self._pooled = b""
        # Unread tokens count, so that a slow client doesn't get a full window in every epoch.
        unread = len(self._emitted) - self._num_consumed
        self._window = max(1, self._limits.credit_window // 8, self._limits.credit_window - unread)
        self._num_credited, self._num_granted = (
            self._num_consumed,
            len(self._emitted) + self._window,
        )
        self.state = "running"
        self._log_transition(f"submit {self.attempt_key} to {target}")
        ids, grammar = (*self._prompt, *self._emitted), self.request.grammar
        submit = Submit(
            pipeline=target.pipeline,
            epoch=target.epoch,
            key=self.attempt_key,
            request=self.request.without_payloads(),
            num_tokens=len(ids),
            num_prompt_tokens=len(self._prompt),
            elapsed_s=now - self._started_at,
            credit_window=self._window,
            payload=Payload("u8", (len(grammar),)) if grammar else None,
            images=tuple(image.span for image in self.request.images),
        )
        self._pixels = PixelSender(self.attempt_key, self.request.images)
        pixels = (SendPixelsAction(target, *each) for each in self._pixels.next_fragments())
        return [*actions, SubmitAction(target, submit, ids, grammar or None), *pixels]

    def _retry(self, reason: str, now: float) -> list[StreamAction]:
        """Resubmit to the same scheduler, a limited number of times."""
        actions = self._cancel_attempt()
        self._failed_attempts += 1
        self._enter_waiting(reason, now)
        self._retry_at = now + self._limits.retry_delay_s
        return [*actions, *self.wake(now)]

    def _on_pipeline_lost(self, reason: str, now: float) -> None:
        """Abandon the submission. If it was being served, the wait for a pipeline restarts.

        It restarts once per epoch, whose number is bounded, not at each broken connection.
        """
        assert self._submitted is not None
        self._abandoned = (self._submitted, self.attempt_key)
        if self._waiting_since is not None:  # no token came
            self._lost_target = self._submitted
            self._lost_at = now if self._lost_at is None else self._lost_at
        if self._is_first_in_epoch or now - self._submitted_at > self._limits.min_service_s:
            self._waiting_since = None
        self._enter_waiting(reason, now)

    def _enter_waiting(self, reason: str, now: float) -> None:
        if self._waiting_since is None:
            self._waiting_since = now
        self._last_reason = reason
        self.state = "waiting"

    def _is_current(self, key: str) -> bool:
        return self.state == "running" and key == self.attempt_key

    def _cancel_attempt(self) -> list[StreamAction]:
        assert self._submitted is not None
        return [SendToSchedulerAction(self._submitted, Cancel(self.attempt_key))]

    def _fail_stream(self, error: MolinkError) -> list[StreamAction]:
        actions = self._cancel_attempt() if self.state == "running" else []
        self.state = "done"
        return [*actions, FailStreamAction(error)]

    def _log_transition(self, text: str) -> None:
        self._transitions.append(text)


def _to_generated_token(
    message: OutputToken, finish: Literal["stop", "length"] | None, pooled: bytes
) -> GeneratedToken:
    return GeneratedToken(
        position=message.position,
        token=message.token,
        logprob=message.logprob,
        top=message.top,
        finish_reason=finish,
        cached_tokens=message.cached_tokens,
        pooled=pooled,
    )
