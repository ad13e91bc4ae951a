"""Requests that are preempted for other clients keep their text, on a real ring."""

import pytest
import torch

from molink.checkpoint.model_source import find_demo_model
from molink.scheduler import request_queues
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import OutputToken, Request
from tests.support.ring_backend import RingBackend

SLOTS, ANSWER = 3, 120


def _request(backend: RingBackend, client: str, number: int, tokens: int) -> Request:
    ids = tuple(backend.tokenizer.encode(f"{number} molink is a swarm, and a swarm is"))
    sampling = SamplingParams(temperature=1.0, seed=number)
    return Request("tiny", ids, tokens, sampling, client=client)


def test_preempted_answers_keep_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queues, "PREEMPT_AFTER_S", 0.01)
    torch.set_num_threads(1)
    folder = find_demo_model().path
    alone = RingBackend(folder)
    whole = [
        [each.token for each in alone.tokens(alone.submit(_request(alone, "a", number, ANSWER)))]
        for number in range(SLOTS + 1)
    ]
    backend = RingBackend(folder, slots=SLOTS)
    held = [backend.submit(_request(backend, "a", number, ANSWER)) for number in range(SLOTS + 1)]
    for number in range(SLOTS + 1):
        short = backend.tokens(backend.submit(_request(backend, "b", number, 5)))
        assert isinstance(short[-1], OutputToken)
        assert [each.token for each in short] == whole[number][:5]
    assert backend.ring.scheduler.collect_stats()[0]["scheduler_preemptions_total"] > 1
    assert len(backend.ring.scheduler.live_requests) == len(held), "none has ended meanwhile"
    assert [[each.token for each in backend.tokens(key)] for key in held] == whole
