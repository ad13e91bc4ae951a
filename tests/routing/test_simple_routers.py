"""Round-robin and least-loaded: exact choices."""

import pytest

from molink.errors import UsageError
from molink.routing.base import PipelineLoad, RoutedPrompt
from molink.routing.create import ROUTERS, create_router

PROMPT = RoutedPrompt("a", 16)


def test_round_robin_passes_over_who_is_not_there() -> None:
    pipelines = [PipelineLoad(name) for name in "acf"]
    turns = create_router("round-robin")
    assert [turns.choose_pipeline(PROMPT, pipelines, 0.0).name for _ in range(4)] == [
        "a",
        "c",
        "f",
        "a",
    ]
    assert turns.choose_pipeline(PROMPT, pipelines[1:], 0.0).name == "c"


def test_least_loaded_goes_by_requests_then_by_those_sent() -> None:
    pipelines = [PipelineLoad("a", 2), PipelineLoad("c", 1), PipelineLoad("f", 1)]
    least = create_router("least-loaded")
    assert least.choose_pipeline(PROMPT, pipelines, 0.0).name == "c"
    pipelines[1].total_sent = 1
    assert least.choose_pipeline(PROMPT, pipelines, 0.0).name == "f"


def test_an_unknown_name() -> None:
    assert set(ROUTERS) == {"round-robin", "least-loaded", "e2"}
    with pytest.raises(UsageError, match="one of round-robin, least-loaded, e2, not 'best'"):
        create_router("best")
