"""Round-robin and least-loaded: exact choices."""

import pytest

from molink.errors import UsageError
from molink.routing.base import PipelineLoad, RoutedPrompt
from molink.routing.create import ROUTERS, create_router

PROMPT = RoutedPrompt("a", 16)


def test_round_robin_passes_over_who_is_not_there() -> None:
    up = [PipelineLoad(name) for name in "acf"]
    turns = create_router("round-robin")
    assert [turns.choose(PROMPT, up, 0.0).name for _ in range(4)] == ["a", "c", "f", "a"]
    assert turns.choose(PROMPT, up[1:], 0.0).name == "c"


def test_least_loaded_goes_by_requests_then_by_those_sent() -> None:
    up = [PipelineLoad("a", 2), PipelineLoad("c", 1), PipelineLoad("f", 1)]
    least = create_router("least-loaded")
    assert least.choose(PROMPT, up, 0.0).name == "c"
    up[1].sent = 1
    assert least.choose(PROMPT, up, 0.0).name == "f"


def test_an_unknown_name() -> None:
    assert set(ROUTERS) == {"round-robin", "least-loaded", "e2"}
    with pytest.raises(UsageError, match="one of round-robin, least-loaded, e2, not 'best'"):
        create_router("best")
