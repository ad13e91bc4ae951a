"""Requests are assembled from their parts, within bounds."""

from typing import Any

import pytest

from molink.errors import ContextTooLong, Overloaded, RequestError
from molink.scheduler.prompt_assembler import (
    MAX_INCOMPLETE_PER_PEER,
    PART_TIMEOUT_S,
    PromptAssembler,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import MAX_GRAMMAR_BYTES, SamplingParams
from molink.wire.messages.serving import PromptFragment, Submit


def submit(key: str = "k", tokens: int = 5, prompt_tokens: int = 5) -> Submit:
    return Submit("p1", 1, key, tokens, prompt_tokens, 8, SamplingParams())


def part(first: int, ids: list[int], key: str = "k", now: float = 0.0) -> tuple[Any, ...]:
    return PromptFragment(key, first, Payload("i32", (len(ids),))), ids, now


def test_parts_make_a_request() -> None:
    intake = PromptAssembler(16, 100)
    intake.begin_request("peer", submit(prompt_tokens=4), 0.0)
    assert intake.add_fragment("peer", *part(0, [1, 2])) is None
    request = intake.add_fragment("peer", *part(2, [3, 4, 5]))
    assert request is not None
    assert (request.peer, request.tokens, request.prompt_tokens) == ("peer", (1, 2, 3, 4, 5), 4)
    assert intake.add_fragment("peer", *part(0, [1])) is None, "it is forgotten by then"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(1, [2, 3])], "does not follow"),
        ([(0, [1, 2]), (1, [3])], "does not follow"),
        ([(0, [1, 2, 3, 4, 5, 6])], "does not follow"),
        ([(0, [1, 100])], "not below 100"),
        ([(0, [-1])], "not below 100"),
    ],
)
def test_parts_that_do_not_fit(parts: list[tuple[int, list[int]]], message: str) -> None:
    intake = PromptAssembler(16, 100)
    intake.begin_request("peer", submit(), 0.0)
    *before, last = parts
    for each in before:
        intake.add_fragment("peer", *part(*each))
    with pytest.raises(RequestError, match=message):
        intake.add_fragment("peer", *part(*last))
    assert intake.add_fragment("peer", *part(0, [1, 2, 3, 4, 5])) is None, "the request is gone"


def test_too_long_is_refused_before_its_ids_come() -> None:
    with pytest.raises(ContextTooLong, match="leaves nothing of the 16"):
        PromptAssembler(16, 100).begin_request("peer", submit(tokens=16, prompt_tokens=16), 0.0)


def test_more_prompt_than_tokens() -> None:
    with pytest.raises(RequestError, match="prompt tokens"):
        PromptAssembler(16, 100).begin_request("peer", submit(tokens=4, prompt_tokens=5), 0.0)


def test_open_requests_of_one_daemon_are_bounded() -> None:
    intake = PromptAssembler(16, 100)
    for index in range(MAX_INCOMPLETE_PER_PEER):
        intake.begin_request("greedy", submit(str(index), tokens=1, prompt_tokens=1), 0.0)
    with pytest.raises(Overloaded, match="incomplete"):
        intake.begin_request("greedy", submit("one more", tokens=1, prompt_tokens=1), 0.0)
    intake.begin_request("other", submit(), 0.0)
    intake.cancel_peer("greedy")
    intake.begin_request("greedy", submit("again"), 0.0)


def test_ids_of_one_daemon_are_bounded() -> None:
    intake = PromptAssembler(16, 100)
    for index in range(4):
        intake.begin_request("greedy", submit(str(index), tokens=15), 0.0)
    with pytest.raises(Overloaded):
        intake.begin_request("greedy", submit("one more"), 0.0)
    intake.begin_request("greedy", submit("2", tokens=15), 0.0)
    assert intake.add_fragment("greedy", *part(0, list(range(15)), "3")) is not None
    intake.begin_request("greedy", submit("one more"), 0.0)


def test_a_request_whose_parts_do_not_come_is_forgotten() -> None:
    intake = PromptAssembler(16, 100)
    for peer in "ab":
        intake.begin_request(peer, submit(), 0.0)
    intake.add_fragment("a", *part(0, [1, 2], now=10.0))
    assert intake.expire_requests(PART_TIMEOUT_S) == []
    assert intake.expire_requests(PART_TIMEOUT_S + 1) == [("b", "k")]
    assert intake.add_fragment("b", *part(0, [1, 2, 3, 4, 5])) is None
    assert intake.add_fragment("a", *part(2, [3, 4, 5])) is not None
    assert intake.expire_requests(1000.0) == []


def test_daemons_do_not_share_keys() -> None:
    intake = PromptAssembler(16, 100)
    intake.begin_request("a", submit(), 0.0)
    assert intake.add_fragment("b", *part(0, [1, 2, 3, 4, 5])) is None
    intake.cancel_request("b", "k")
    assert intake.add_fragment("a", *part(0, [1, 2, 3, 4, 5])) is not None


def test_a_grammar_comes_with_the_request_and_is_bounded() -> None:
    intake = PromptAssembler(16, 100)
    intake.begin_request("peer", submit(), 0.0, b"start: /a/")
    request = intake.add_fragment("peer", *part(0, [1, 2, 3, 4, 5]))
    assert request is not None
    assert request.grammar == b"start: /a/"
    with pytest.raises(RequestError, match="at most"):
        intake.begin_request("peer", submit(), 0.0, b"x" * (MAX_GRAMMAR_BYTES + 1))
