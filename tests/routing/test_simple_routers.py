"""Round robin, least loaded and the fallback: exact choices."""

from collections.abc import Callable, Sequence

import pytest

from molink.errors import UsageError
from molink.routing.base import PipelineLoad, RoutedPrompt, Router
from molink.routing.cache_report import CacheReport
from molink.routing.create import ROUTERS, create_router
from molink.routing.e2 import E2Router
from molink.routing.simple_routers import FallbackRouter

PROMPT = RoutedPrompt("a", 16)


def test_round_robin_skips_missing_pipelines() -> None:
    pipelines = [PipelineLoad(name) for name in "acf"]
    scheduled = create_router("round-robin")
    assert [scheduled.choose_pipeline(PROMPT, pipelines, 0.0).name for _ in range(4)] == [
        "a",
        "c",
        "f",
        "a",
    ]
    assert scheduled.choose_pipeline(PROMPT, pipelines[1:], 0.0).name == "c"


def test_least_loaded_breaks_ties_by_requests_sent() -> None:
    pipelines = [PipelineLoad("a", 2), PipelineLoad("c", 1), PipelineLoad("f", 1)]
    least = create_router("least-loaded")
    assert least.choose_pipeline(PROMPT, pipelines, 0.0).name == "c"
    pipelines[1].total_sent = 1
    assert least.choose_pipeline(PROMPT, pipelines, 0.0).name == "f"


def test_an_unknown_router_is_rejected() -> None:
    assert set(ROUTERS) == {"round-robin", "least-loaded", "e2"}
    with pytest.raises(UsageError, match="one of round-robin, least-loaded, e2, not 'best'"):
        create_router("best")


PROMPT = RoutedPrompt("k", 100)


class Broken(Router):
    """A router whose calls all fail."""

    reads_spans = True

    def choose_pipeline(
        self, prompt: RoutedPrompt, up: Sequence[PipelineLoad], now: float
    ) -> PipelineLoad:
        raise KeyError(prompt.key)

    def on_first_token(self, key: str, cached: int, now: float) -> None:
        raise ZeroDivisionError

    def on_request_end(self, key: str, generated: int, now: float) -> None:
        raise ZeroDivisionError

    def on_cache_report(self, name: str, report: CacheReport, now: float) -> None:
        raise ZeroDivisionError

    def on_pipeline_removed(self, name: str) -> None:
        raise ZeroDivisionError


def up() -> list[PipelineLoad]:
    return [PipelineLoad("a", 3), PipelineLoad("b", 1), PipelineLoad("c", 2)]


def test_a_working_router_is_used() -> None:
    router = FallbackRouter(E2Router())
    assert router.choose_pipeline(PROMPT, up(), 0.0).name == "b"
    assert router.reads_spans
    assert router.decision_counts == {**E2Router().decision_counts, "explored": 1, "lost": 0}


@pytest.mark.parametrize(
    "tell",
    [
        lambda router: router.choose_pipeline(PROMPT, up(), 0.0),
        lambda router: router.on_first_token("k", 0, 0.0),
        lambda router: router.on_request_end("k", 0, 0.0),
        lambda router: router.on_cache_report("a", CacheReport(1, True), 0.0),
        lambda router: router.on_pipeline_removed("a"),
    ],
)
def test_a_failed_router_is_replaced(
    tell: Callable[[Router], object], caplog: pytest.LogCaptureFixture
) -> None:
    router = FallbackRouter(Broken())
    tell(router)
    assert [router.choose_pipeline(PROMPT, up(), 0.0).name for _ in range(2)] == ["b", "b"]
    tell(router)
    assert router.decision_counts == {"lost": 1}
    assert not router.reads_spans
    (record,) = caplog.records
    assert "requests now go to the least loaded pipeline" in record.message
    assert record.exc_info is not None


def test_choosing_a_missing_pipeline_is_a_failure() -> None:
    class Stale(Broken):
        def choose_pipeline(
            self, prompt: RoutedPrompt, up: Sequence[PipelineLoad], now: float
        ) -> PipelineLoad:
            return PipelineLoad("b")

    router = FallbackRouter(Stale())
    there = up()
    assert router.choose_pipeline(PROMPT, there, 0.0) is there[1]
    assert router.decision_counts == {"lost": 1}
