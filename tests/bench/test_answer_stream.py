import json
from collections.abc import Iterable

import pytest

from molink.bench.answer_stream import MAX_LINE_BYTES, AnswerStream
from molink.bench.report import Sample
from molink.errors import Unavailable


def event(content: str | None = None, finish: str | None = None) -> dict[str, object]:
    delta = {} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def usage(prompt: int, completion: int) -> dict[str, object]:
    return {
        "choices": [],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 0},
    }


def sse(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def read(script: Iterable[tuple[float, bytes]], sent: float = 10.0) -> Sample:
    stream = AnswerStream(sent)
    for now, data in script:
        stream.feed_data(data, now)
    return stream.to_sample()


ANSWER = (
    (10.5, sse(event("", None))),
    (11.0, sse(event("a"))),
    (11.2, sse(event("b"))),
    (11.5, sse(event("c"))),
    (11.5, sse(event(None, "stop"))),
    (11.6, sse(usage(7, 6)) + b"data: [DONE]\n\n"),
)


def test_times_of_a_chat_answer() -> None:
    sample = read(ANSWER)
    assert sample.ttft == pytest.approx(1.0)
    assert sample.latency == pytest.approx(1.5)
    assert sample.itl == pytest.approx((0.2, 0.3))
    # The server counts six tokens, although only three pieces arrived.
    assert (sample.input_tokens, sample.output_tokens) == (7, 6)
    assert sample.tpot == pytest.approx(0.1)


def test_pieces_count_as_tokens_without_usage() -> None:
    sample = read(ANSWER[:-1])
    assert sample.output_tokens == 3
    assert sample.tpot == pytest.approx(0.25)


@pytest.mark.parametrize("cut", [1, 2, 7, 1000])
def test_events_may_be_cut_anywhere(cut: int) -> None:
    whole = b"".join(data for _, data in ANSWER)
    pieces = [whole[at : at + cut] for at in range(0, len(whole), cut)]
    sample = read((11.0, piece) for piece in pieces)
    assert (sample.output_tokens, len(sample.piece_times)) == (6, 3)


def test_plain_completions_and_other_fields() -> None:
    stream = AnswerStream(0.0)
    stream.feed_data(b": keep-alive\r\nevent: x\r\n\r\n", 0.5)
    stream.feed_data(sse({"choices": [{"text": "a", "finish_reason": None, "more": 1}]}), 1.0)
    stream.feed_data(sse({"choices": [{"text": "b", "finish_reason": "length"}]}), 2.0)
    sample = stream.to_sample()
    assert (sample.piece_times, sample.finished_at) == ((1.0, 2.0), 2.0)


def test_an_answer_without_text_has_a_ttft() -> None:
    sample = read([(12.0, sse(event("", "stop"))), (12.0, sse(usage(3, 1)))])
    assert (sample.ttft, sample.tpot, sample.itl) == (2.0, None, ())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (sse({"error": {"message": "out of blocks", "code": 500}}), "out of blocks"),
        (sse({"error": "plain"}), "plain"),
        (b"data: {\n\n", "invalid event"),
        (sse({"choices": 3}), "invalid event"),
        (b"x" * (MAX_LINE_BYTES + 1), "a line of more than"),
    ],
)
def test_invalid_events_are_rejected(data: bytes, message: str) -> None:
    with pytest.raises(Unavailable, match=message):
        AnswerStream(0.0).feed_data(data, 1.0)


def test_an_incomplete_answer_is_rejected() -> None:
    stream = AnswerStream(0.0)
    stream.feed_data(sse(event("a")), 1.0)
    with pytest.raises(Unavailable, match="ended before"):
        stream.to_sample()
