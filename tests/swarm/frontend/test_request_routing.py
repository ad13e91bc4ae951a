"""An endpoint's router: what it is told, and that pipelines which end are forgotten."""

from molink.routing.base import PipelineLoad, RoutedPrompt, Router
from molink.routing.e2 import E2
from molink.routing.least_loaded import LeastLoaded
from molink.routing.report import CacheReport
from molink.routing.spans import SPAN, span_digests
from molink.swarm.frontend.request_routing import RequestRouting
from molink.swarm.frontend.stream import HeadEpoch

A, B, LATER = HeadEpoch("a", 1), HeadEpoch("b", 1), HeadEpoch("a", 2)
LONG = tuple(range(4 * SPAN))


def test_a_single_pipeline_is_not_asked_about() -> None:
    class Never(Router):
        def choose(self, prompt: RoutedPrompt, up: object, now: float) -> PipelineLoad:
            raise AssertionError("nobody has to choose")

    routing = RequestRouting(Never())
    assert routing.choose("k", LONG, [A], 0.0) == A
    assert routing.choose("k", LONG, [], 0.0) is None
    assert routing.wants(A, 0) is None


def test_loads_are_those_that_are_not_over() -> None:
    routing = RequestRouting(LeastLoaded())
    assert [routing.choose(key, LONG, [A, B], 0.0) for key in "12"] == [A, B]
    routing.over("2", 3, 1.0)
    routing.over("2", 3, 1.0)
    assert routing.choose("3", LONG, [A, B], 2.0) == B
    # The first one is lost and asks again: it is no load any more.
    assert routing.choose("1", LONG, [A, B], 3.0) == A
    assert routing.wants(A, 1) is None


def test_what_begins_alike_goes_to_the_same_and_others_spread() -> None:
    routing = RequestRouting(E2())
    first = routing.choose("1", LONG, [A, B], 0.0)
    routing.began("1", 0, 1.0)
    routing.over("1", 4, 2.0)
    other = routing.choose("2", LONG[::-1], [A, B], 3.0)
    assert {first, other} == {A, B}
    assert routing.choose("3", (*LONG, 1, 2, 3), [A, B], 4.0) == first
    assert routing.counts["exploited"] == 1


def test_reports_say_what_other_endpoints_have_brought() -> None:
    routing = RequestRouting(E2())
    routing.choose("1", (1, 2), [A, B], 0.0)
    assert (routing.wants(A, 1), routing.wants(B, 1)) == (-1, -1)
    routing.over("1", 1, 0.5)
    routing.reported(B, CacheReport(9, True, span_digests(LONG)), 1.0)
    assert routing.wants(B, 1) == 9
    assert routing.choose("2", LONG, [A, B], 2.0) == B
    routing.reported(B, CacheReport(12, False, evicted=span_digests(LONG)), 3.0)
    # Older news that was late, and of one that nobody knows.
    routing.reported(B, CacheReport(9, True, span_digests(LONG)), 4.0)
    routing.reported(HeadEpoch("c", 1), CacheReport(1, True), 4.0)
    assert routing.wants(B, 1) == 12
    assert routing.choose("3", LONG, [A, B], 5.0) == A


def test_the_next_epoch_of_a_pipeline_has_nothing() -> None:
    routing = RequestRouting(E2())
    assert routing.choose("1", LONG, [A, B], 0.0) == A
    routing.reported(A, CacheReport(3, True, span_digests(LONG)), 1.0)
    routing.keep([B, LATER])
    assert routing.choose("1", LONG, [B, LATER], 2.0) == B
    routing.over("1", 4, 3.0)
    assert routing.wants(LATER, 1) == routing.wants(A, 1) == -1
    assert routing.choose("2", LONG, [LATER, B], 4.0) == B
