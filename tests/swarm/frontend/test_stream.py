"""The request stream: exact actions; positions are emitted once and in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from molink.errors import ContextTooLong, Overloaded, RequestError, Unavailable
from molink.facts.images import ImageInput, ImageSpan
from molink.swarm.frontend.stream import (
    EmitTokenAction,
    FailStreamAction,
    PipelineEpoch,
    RequestStream,
    SendPixelsAction,
    SendToSchedulerAction,
    StreamAction,
    StreamLimits,
    SubmitAction,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import (
    PIXEL_FRAGMENT,
    Cancel,
    Credit,
    OutputToken,
    PixelsReceived,
    PooledOutput,
    Rejected,
    Request,
)

ONE = PipelineEpoch("p1", 1)
TWO = PipelineEpoch("p1", 2)
PROMPT = (10, 11, 12)
LIMITS = StreamLimits(
    pipeline_wait_timeout=30.0,
    credit_window=8,
    max_failed_attempts=3,
    retry_delay_s=0.25,
    min_service_s=2.0,
)


def make(max_tokens: int = 5, now: float = 0.0) -> RequestStream:
    request = Request("m", PROMPT, max_tokens, SamplingParams(seed=7), (99,))
    return RequestStream("k", request, LIMITS, now)


def token(
    stream: RequestStream, position: int, value: int, epoch: int = 1, finish: str | None = None
) -> OutputToken:
    return OutputToken(epoch, stream.attempt_key, position, value, finish_reason=finish)


def rejected(
    stream: RequestStream, reason: str, epoch: int = 1, retry_after: float = 0.0
) -> Rejected:
    return Rejected(epoch, stream.attempt_key, reason, "because", retry_after)


def emitted(acts: list[StreamAction]) -> list[int]:
    return [act.token.token for act in acts if isinstance(act, EmitTokenAction)]


def submitted(acts: list[StreamAction]) -> SubmitAction:
    (act,) = [act for act in acts if isinstance(act, SubmitAction)]
    return act


def failure(acts: list[StreamAction]) -> Exception:
    (act,) = [act for act in acts if isinstance(act, FailStreamAction)]
    return act.error


def test_undisturbed_request() -> None:
    stream = make(max_tokens=2)
    assert stream.state == "waiting"
    submit = submitted(stream.set_target(ONE, 0.0))
    assert submit.target == ONE
    assert submit.token_ids == PROMPT
    assert (submit.submit.num_tokens, submit.submit.num_prompt_tokens) == (3, 3)
    assert submit.submit.request == stream.request.without_payloads()
    assert stream.next_wake_at is None
    assert emitted(stream.on_token(token(stream, 3, 50), 1.0)) == [50]
    last = stream.on_token(token(stream, 4, 99, finish="stop"), 2.0)
    assert [act.token.finish_reason for act in last if isinstance(act, EmitTokenAction)] == ["stop"]
    assert stream.state == "done"
    assert stream.cancel() == []


def test_resubmissions_carry_the_request_and_its_elapsed_time() -> None:
    request = Request(
        "m", PROMPT, 5, SamplingParams(), (), b"", "abc", -1, max_queue_s=20.0, deadline_s=31.5
    )
    stream = RequestStream("k", request, LIMITS, 0.0)
    submit = submitted(stream.set_target(ONE, 4.0)).submit
    assert (submit.request, submit.elapsed_s) == (request.without_payloads(), 4.0)
    assert stream.set_target(None, 5.0) == []
    submit = submitted(stream.set_target(TWO, 10.0)).submit
    assert (submit.request, submit.elapsed_s) == (request.without_payloads(), 10.0)


def sent_pixels(acts: list[StreamAction], key: str) -> list[tuple[int, int]]:
    found = [act for act in acts if isinstance(act, SendPixelsAction)]
    assert {act.fragment.key for act in found} <= {key}
    return [(act.fragment.first, act.data.nbytes) for act in found]


def test_pixels_follow_as_they_are_received_and_again_after_a_loss() -> None:
    """Two images, of 5 and 1 fragments, with 4 fragments in flight at most."""
    size = PIXEL_FRAGMENT
    images = tuple(
        ImageInput(ImageSpan(start, 1, 256, nbytes // 768), bytes(nbytes))
        for start, nbytes in ((0, 4 * size + 768), (1, 768))
    )
    request = Request("m", PROMPT, 5, SamplingParams(), images=images)
    assert request.without_payloads().images == ()
    stream = RequestStream("k", request, LIMITS, 0.0)
    acts = stream.set_target(ONE, 0.0)
    key = stream.attempt_key
    assert submitted(acts).submit.images == tuple(image.span for image in images)
    begun = [(index * size, size) for index in range(4)]
    assert sent_pixels(acts, key) == begun
    received = PixelsReceived(1, key, size)
    assert sent_pixels(stream.on_pixels_received(received), key) == [(4 * size, 768)]
    assert sent_pixels(stream.on_pixels_received(received), key) == []
    received = PixelsReceived(1, key, 4 * size)
    assert sent_pixels(stream.on_pixels_received(received), key) == [(4 * size + 768, 768)]
    assert stream.on_pixels_received(PixelsReceived(1, key, 99 * size)) == []
    stream.set_target(None, 1.0)
    assert stream.on_pixels_received(received) == []
    again = stream.set_target(TWO, 2.0)
    assert sent_pixels(again, stream.attempt_key) == begun


def test_queue_time_bounds_the_wait_for_a_pipeline() -> None:
    request = Request("m", PROMPT, 5, SamplingParams(), max_queue_s=3.0)
    stream = RequestStream("k", request, LIMITS, 0.0)
    assert stream.next_wake_at == 3.0
    assert isinstance(failure(stream.wake(3.0)), Unavailable)
    late = RequestStream("k", request, LIMITS, 0.0)
    error = failure(late.set_target(ONE, 3.0))
    assert isinstance(error, Overloaded), "there is a pipeline"
    assert str(error) == "the request was not started within 3 s (`max_queue_time`)"


def test_new_epoch_resubmits_prompt_and_emitted_tokens() -> None:
    stream = make(max_tokens=5)
    stream.set_target(ONE, 0.0)
    stream.on_token(token(stream, 3, 50), 1.0)
    stream.on_token(token(stream, 4, 51), 1.0)
    assert stream.set_target(None, 2.0) == []
    assert stream.state == "waiting"
    submit = submitted(stream.set_target(TWO, 9.0))
    assert submit.token_ids == (*PROMPT, 50, 51)
    assert (submit.submit.num_prompt_tokens, submit.submit.request.max_tokens) == (3, 5)
    assert submit.submit.epoch == 2
    # A repeated position is dropped, the next one emitted.
    assert emitted(stream.on_token(token(stream, 4, 77, epoch=2), 9.1)) == []
    assert emitted(stream.on_token(token(stream, 5, 52, epoch=2), 9.2)) == [52]
    stream.validate()


def test_tokens_of_an_earlier_submission_are_dropped() -> None:
    stream = make()
    stream.set_target(ONE, 0.0)
    late = token(stream, 3, 50)
    stream.set_target(None, 1.0)
    stream.set_target(TWO, 2.0)
    assert stream.on_token(late, 2.1) == []
    assert stream.on_token(token(stream, 3, 50, epoch=1), 2.2) == []


def test_the_row_of_an_embedding_comes_with_its_token() -> None:
    stream = make(max_tokens=1)
    stream.set_target(ONE, 0.0)
    lost = PooledOutput(1, stream.attempt_key, Payload("f32", (1,)))
    stream.on_pooled(lost, b"lost")
    stream.set_target(TWO, 1.0)
    stream.on_pooled(lost, b"late")
    row = PooledOutput(2, stream.attempt_key, Payload("f32", (1,)))
    stream.on_pooled(row, b"good")
    stream.on_pooled(structs.replace(row, key="k.9"), b"bad")
    (act,) = stream.on_token(token(stream, 3, 0, 2, "length"), 2.0)
    assert isinstance(act, EmitTokenAction)
    assert act.token.pooled == b"good"
    other = make(max_tokens=1)
    other.set_target(ONE, 0.0)
    other.on_pooled(PooledOutput(1, other.attempt_key, Payload("f32", (1,))), b"lost")
    other.set_target(TWO, 1.0)
    (act,) = other.on_token(token(other, 3, 0, 2, "length"), 2.0)
    assert isinstance(act, EmitTokenAction)
    assert act.token.pooled == b""


def test_reconnect_cancels_the_old_submission() -> None:
    stream = make()
    stream.set_target(ONE, 0.0)
    old = stream.attempt_key
    stream.set_target(None, 1.0)
    acts = stream.set_target(ONE, 1.5)
    assert acts[0] == SendToSchedulerAction(ONE, Cancel(old))
    assert submitted(acts).submit.key != old


def test_gap_causes_a_resubmission() -> None:
    stream = make()
    stream.set_target(ONE, 0.0)
    acts = stream.on_token(token(stream, 4, 51), 1.0)
    assert [type(act) for act in acts] == [SendToSchedulerAction]
    assert stream.next_wake_at == 1.25
    assert submitted(stream.wake(1.25)).token_ids == PROMPT


def test_stream_waits_while_formation_progresses() -> None:
    stream = make()
    now = 0.0
    for sign in range(1, 8):
        now = 25.0 * sign
        stream.on_formation_progress(sign, now)
        assert stream.wake(now) == []
        assert stream.next_wake_at == now + 30.0
    stream.on_formation_progress(7, now + 20)  # no new tokens
    stream.on_formation_progress(0, now + 25)  # the connection broke
    assert stream.wake(now + 29.9) == []
    assert "for 205 s" in str(failure(stream.wake(now + 30.0)))


def test_wait_is_bounded_despite_progress() -> None:
    stream = make()
    for sign in range(1, 24):
        stream.on_formation_progress(sign, 25.0 * sign)
        assert stream.wake(25.0 * sign) == []
    stream.on_formation_progress(24, 599.0)
    assert stream.next_wake_at == 600.0
    assert "for 600 s" in str(failure(stream.wake(600.0)))


def test_request_fails_without_a_pipeline() -> None:
    stream = make()
    assert stream.set_target(None, 0.0) == []
    assert stream.next_wake_at == 30.0
    assert stream.wake(29.9) == []
    assert isinstance(failure(stream.wake(30.0)), Unavailable)
    assert stream.state == "done"


def test_lost_pipeline_restarts_the_wait() -> None:
    stream = make()
    stream.set_target(ONE, 0.0)
    stream.set_target(None, 100.0)
    assert stream.next_wake_at == 130.0


def test_overload_before_the_first_token_fails_the_request() -> None:
    stream = make()
    stream.set_target(ONE, 0.0)
    error = failure(stream.on_rejected(rejected(stream, "overloaded", retry_after=3.0), 0.1))
    assert isinstance(error, Overloaded)
    assert error.retry_after == 3.0


def test_overload_in_mid_stream_is_a_pause() -> None:
    stream = make()
    stream.set_target(ONE, 0.0)
    stream.on_token(token(stream, 3, 50), 1.0)
    stream.set_target(TWO, 2.0)
    assert stream.on_rejected(rejected(stream, "overloaded", 2, 3.0), 2.1) == []
    assert stream.next_wake_at == pytest.approx(5.1)
    assert submitted(stream.wake(5.2)).token_ids == (*PROMPT, 50)


@pytest.mark.parametrize(
    ("reason", "kind"), [("too_long", ContextTooLong), ("invalid", RequestError)]
)
def test_permanent_rejections_fail_the_request(reason: str, kind: type[Exception]) -> None:
    stream = make()
    stream.set_target(ONE, 0.0)
    assert isinstance(failure(stream.on_rejected(rejected(stream, reason), 0.1)), kind)


def test_epoch_rejection_waits_for_the_new_epoch() -> None:
    stream = make()
    stream.set_target(ONE, 0.0)
    assert stream.on_rejected(rejected(stream, "epoch"), 0.1) == []
    assert stream.state == "waiting"
    assert submitted(stream.set_target(TWO, 0.5)).target == TWO


def test_permanent_epoch_rejection_ends_with_the_wait() -> None:
    stream, now = make(), 0.0
    stream.set_target(ONE, now)
    for _ in range(1000):
        if stream.state == "done":
            break
        if stream.state == "running":
            acts = stream.on_rejected(rejected(stream, "epoch"), now)
        else:
            assert stream.next_wake_at is not None
            now = stream.next_wake_at
            acts = stream.wake(now)
    assert isinstance(failure(acts), Unavailable)
    assert now == pytest.approx(30.0, abs=0.5)


def test_failures_are_retried_a_few_times() -> None:
    stream, now = make(), 0.0
    stream.set_target(ONE, now)
    for _ in range(LIMITS.max_failed_attempts):
        acts = stream.on_rejected(rejected(stream, "failed"), now)
        assert not any(isinstance(act, FailStreamAction) for act in acts)
        now += LIMITS.retry_delay_s
        submitted(stream.wake(now))
    assert isinstance(failure(stream.on_rejected(rejected(stream, "failed"), now)), Unavailable)


def test_request_that_crashes_every_pipeline_fails() -> None:
    stream = make()
    acts: list[StreamAction] = []
    for epoch in range(1, 20):
        acts = stream.set_target(PipelineEpoch("p1", epoch), float(epoch))
        if stream.state == "done":
            break
        acts = stream.set_target(None, epoch + 0.5)
        if stream.state == "done":
            break
    assert isinstance(failure(acts), Unavailable)
    assert epoch <= LIMITS.max_failed_attempts + 2


def flapping(
    stream: RequestStream, seconds: float, served: float
) -> tuple[float, list[StreamAction]]:
    """Break the connection ``served`` seconds after each submission, and restore it at once."""
    now, acts = 0.0, stream.set_target(ONE, 0.0)
    while stream.state != "done" and now < seconds:
        now += served
        acts = [*stream.set_target(None, now), *stream.set_target(ONE, now + 0.1)]
        now += 0.1
    return now, acts


def test_broken_connections_only_cost_time() -> None:
    stream = make()
    flapping(stream, seconds=29.0, served=0.5)
    assert stream.state == "running"
    assert emitted(stream.on_token(token(stream, 3, 50), 29.5)) == [50]
    # The next wait is counted from zero.
    stream.set_target(None, 40.0)
    assert stream.next_wake_at == 70.0


def test_connection_that_always_breaks_ends_with_the_wait() -> None:
    now, acts = flapping(make(), seconds=1000.0, served=0.5)
    assert "for 30 s" in str(failure(acts))
    assert now == pytest.approx(30.0, abs=1.0)


def test_service_of_some_seconds_restarts_the_wait() -> None:
    now, acts = flapping(make(), seconds=1000.0, served=40.0)
    assert isinstance(failure(acts), Unavailable)
    # Counted from the first loss.
    assert now == pytest.approx(640.0, abs=41.0)


def test_credit_is_sent_in_quarters_of_the_window() -> None:
    stream = make(max_tokens=100)
    stream.set_target(ONE, 0.0)
    for position in range(3, 8):
        stream.on_token(token(stream, position, 50), 0.1)
    assert stream.on_tokens_consumed(1) == []
    assert stream.on_tokens_consumed(1) == [
        SendToSchedulerAction(ONE, Credit(stream.attempt_key, 5))
    ]
    assert stream.on_tokens_consumed(1) == []


def test_slow_client_survives_many_epochs() -> None:
    stream = make(max_tokens=1000)
    position, windows = 3, []
    for epoch in range(1, 12):
        windows.append(
            submitted(
                stream.set_target(PipelineEpoch("p1", epoch), float(epoch))
            ).submit.credit_window
        )
        for _ in range(windows[-1]):
            assert emitted(stream.on_token(token(stream, position, 50, epoch), float(epoch)))
            position += 1
    assert windows == [8] + [1] * 10
    # Small windows need small credits, or their schedulers would wait endlessly.
    credits = [act for _ in range(position - 3) for act in stream.on_tokens_consumed(1)]
    assert credits[-1] == SendToSchedulerAction(
        PipelineEpoch("p1", 11), Credit(stream.attempt_key, position)
    )
    stream.validate()


def test_scheduler_that_ignores_credit_is_dropped() -> None:
    stream = make(max_tokens=1000)
    stream.set_target(ONE, 0.0)
    acts: list[StreamAction] = []
    for position in range(3, 100):
        acts = stream.on_token(token(stream, position, 50), 0.1)
        if stream.state == "done":
            break
    assert isinstance(failure(acts), Unavailable)
    assert position < 3 + 3 * LIMITS.credit_window


def test_cancel_reaches_the_scheduler() -> None:
    stream = make()
    stream.set_target(ONE, 0.0)
    assert stream.cancel() == [SendToSchedulerAction(ONE, Cancel(stream.attempt_key))]
    assert stream.set_target(TWO, 1.0) == []
    assert stream.on_token(token(stream, 3, 50), 1.0) == []


def test_tokens_beyond_max_tokens_are_cancelled() -> None:
    stream = make(max_tokens=1)
    stream.set_target(ONE, 0.0)
    acts = stream.on_token(token(stream, 3, 50), 0.1)
    assert [act.token.finish_reason for act in acts if isinstance(act, EmitTokenAction)] == [
        "length"
    ]
    assert SendToSchedulerAction(ONE, Cancel("k.1")) in acts


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("head"), st.integers(0, 3)),
        st.tuples(st.just("token"), st.integers(-2, 2)),
        st.tuples(st.just("reject"), st.sampled_from(["epoch", "failed", "overloaded"])),
        st.tuples(st.just("late"), st.integers(0, 5)),
        st.tuples(st.just("taken"), st.just(1)),
        st.tuples(st.just("wake"), st.integers(0, 5)),
    ),
    max_size=60,
)


@given(STEPS)
def test_positions_are_emitted_once_and_in_order(steps: list[tuple[str, int | str]]) -> None:
    """The client always sees the tokens of one undisturbed run."""
    stream = RequestStream(
        "k", Request("m", PROMPT, 12, SamplingParams(), ()), StreamLimits(credit_window=64), 0.0
    )
    now, epoch, seen = 0.0, 0, []
    sent_but_not_taken = 0
    for what, value in steps:
        now += 0.1
        acts: list[StreamAction] = []
        position = len(PROMPT) + len(seen)
        if what == "head":
            epoch += value
            acts = stream.set_target(PipelineEpoch("p", epoch) if value else None, now)
        elif what == "token":
            at = max(0, position + value)
            acts = stream.on_token(OutputToken(epoch, stream.attempt_key, at, 1000 + at), now)
        elif what == "reject":
            acts = stream.on_rejected(Rejected(epoch, stream.attempt_key, value, "x"), now)
        elif what == "late":
            acts = stream.on_token(OutputToken(epoch, f"k.{value}", position, 1000 + position), now)
        elif what == "taken" and sent_but_not_taken:
            sent_but_not_taken -= 1
            acts = stream.on_tokens_consumed(1)
        elif what == "wake":
            now += value
            acts = stream.wake(now)
        for act in acts:
            if isinstance(act, EmitTokenAction):
                seen.append((act.token.position, act.token.token))
                sent_but_not_taken += 1
        stream.validate()
    assert seen == [(len(PROMPT) + i, 1000 + len(PROMPT) + i) for i in range(len(seen))]


def test_each_submission_carries_the_grammar() -> None:
    grammar = b"start: /a/"
    request = Request("m", PROMPT, 5, SamplingParams(), (99,), grammar)
    stream = RequestStream("k", request, StreamLimits(), 0.0)
    for epoch in (1, 2):
        act = submitted(stream.set_target(PipelineEpoch("p1", epoch), 0.0))
        assert act.submit.payload == Payload("u8", (len(grammar),))
        assert act.grammar == grammar
    assert submitted(make().set_target(ONE, 0.0)).submit.payload is None
