"""Routing of an endpoint's requests."""

from molink.routing.base import PipelineLoad, RoutedPrompt, Router
from molink.routing.cache_report import SPAN_TOKENS, CacheReport, span_digests
from molink.routing.e2 import E2Router
from molink.routing.simple_routers import LeastLoadedRouter
from molink.swarm.frontend.request_router import RequestRouter
from molink.swarm.frontend.stream import PipelineEpoch
from molink.wire.messages.data_plane import SamplingParams
from molink.wire.messages.serving import Request

A, B, LATER = PipelineEpoch("a", 1), PipelineEpoch("b", 1), PipelineEpoch("a", 2)
LONG = tuple(range(4 * SPAN_TOKENS))


def asked(prompt: tuple[int, ...], salt: bytes = b"", adapter: str = "") -> Request:
    return Request("m", prompt, 1, SamplingParams(), cache_salt=salt, adapter=adapter)


def test_single_pipeline_needs_no_router() -> None:
    class Never(Router):
        def choose_pipeline(self, prompt: RoutedPrompt, up: object, now: float) -> PipelineLoad:
            raise AssertionError("nobody has to choose")

    routing = RequestRouter(Never())
    assert routing.choose_pipeline("k", asked(LONG), [A], 0.0) == A
    assert routing.choose_pipeline("k", asked(LONG), [], 0.0) is None
    assert routing.cache_version_for(A, 0) is None


def test_load_counts_unfinished_requests() -> None:
    routing = RequestRouter(LeastLoadedRouter())
    assert [routing.choose_pipeline(key, asked(LONG), [A, B], 0.0) for key in "12"] == [A, B]
    routing.on_request_finished("2", 3, 1.0)
    routing.on_request_finished("2", 3, 1.0)
    assert routing.choose_pipeline("3", asked(LONG), [A, B], 2.0) == B
    # A lost request that chooses again is no longer counted.
    assert routing.choose_pipeline("1", asked(LONG), [A, B], 3.0) == A
    assert routing.cache_version_for(A, 1) is None


def test_shared_prefixes_share_a_pipeline_and_others_spread() -> None:
    routing = RequestRouter(E2Router())
    first = routing.choose_pipeline("1", asked(LONG), [A, B], 0.0)
    routing.on_first_token("1", 0, 1.0)
    routing.on_request_finished("1", 4, 2.0)
    other = routing.choose_pipeline("2", asked(LONG[::-1]), [A, B], 3.0)
    assert {first, other} == {A, B}
    assert routing.choose_pipeline("3", asked((*LONG, 1, 2, 3)), [A, B], 4.0) == first
    assert routing.counts["exploited"] == 1


def test_prompts_with_another_salt_are_others() -> None:
    routing = RequestRouter(E2Router())
    routing.choose_pipeline("1", asked(LONG, b"one"), [A, B], 0.0)
    routing.on_first_token("1", 0, 1.0)
    for number, salt in enumerate((b"two", b"", b"one")):
        key = f"later {number}"
        routing.choose_pipeline(key, asked(LONG, salt), [A, B], 2.0 + number)
        routing.on_request_finished(key, 1, 3.0 + number)
    assert (routing.counts["explored"], routing.counts["exploited"]) == (3, 1)


def test_prompts_with_another_adapter_are_others() -> None:
    routing = RequestRouter(E2Router())
    routing.choose_pipeline("1", asked(LONG, adapter="one"), [A, B], 0.0)
    routing.on_first_token("1", 0, 1.0)
    for number, adapter in enumerate(("two", "", "one")):
        key = f"later {number}"
        routing.choose_pipeline(key, asked(LONG, adapter=adapter), [A, B], 2.0 + number)
        routing.on_request_finished(key, 1, 3.0 + number)
    assert (routing.counts["explored"], routing.counts["exploited"]) == (3, 1)


def test_cache_reports_include_other_endpoints_prefixes() -> None:
    routing = RequestRouter(E2Router())
    routing.choose_pipeline("1", asked((1, 2)), [A, B], 0.0)
    assert (routing.cache_version_for(A, 1), routing.cache_version_for(B, 1)) == (-1, -1)
    routing.on_request_finished("1", 1, 0.5)
    routing.on_cache_report(B, CacheReport(9, True, span_digests(LONG)), 1.0)
    assert routing.cache_version_for(B, 1) == 9
    assert routing.choose_pipeline("2", asked(LONG), [A, B], 2.0) == B
    routing.on_cache_report(B, CacheReport(12, False, evicted_spans=span_digests(LONG)), 3.0)
    # An outdated report, and a report about an unknown pipeline.
    routing.on_cache_report(B, CacheReport(9, True, span_digests(LONG)), 4.0)
    routing.on_cache_report(PipelineEpoch("c", 1), CacheReport(1, True), 4.0)
    assert routing.cache_version_for(B, 1) == 12
    assert routing.choose_pipeline("3", asked(LONG), [A, B], 5.0) == A


def test_next_epoch_starts_with_an_empty_cache() -> None:
    routing = RequestRouter(E2Router())
    assert routing.choose_pipeline("1", asked(LONG), [A, B], 0.0) == A
    routing.on_cache_report(A, CacheReport(3, True, span_digests(LONG)), 1.0)
    routing.retain_pipelines([B, LATER])
    assert routing.choose_pipeline("1", asked(LONG), [B, LATER], 2.0) == B
    routing.on_request_finished("1", 4, 3.0)
    assert routing.cache_version_for(LATER, 1) == routing.cache_version_for(A, 1) == -1
    assert routing.choose_pipeline("2", asked(LONG), [LATER, B], 4.0) == B
