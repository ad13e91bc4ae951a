"""E2: exact choices, and robustness against wrong reports."""

import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.facts.ring_times import RequestCosts
from molink.routing.base import PipelineLoad, RoutedPrompt
from molink.routing.cache_report import SPAN_TOKENS, CacheReport
from molink.routing.e2 import E2Router
from molink.routing.span_tree import MAX_SPANS

COSTS = RequestCosts(token_s=0.001, answer_s=0.001)
KEYS = count()


def prompt(family: int, shared: int, own: int) -> RoutedPrompt:
    """A prompt of ``shared`` spans of a family, and ``own`` spans of its own."""
    key = next(KEYS)
    spans = [family * 1000 + index for index in range(shared)]
    spans += [10**6 + key * 1000 + index for index in range(own)]
    return RoutedPrompt(str(key), len(spans) * SPAN_TOKENS + 10, spans)


@pytest.fixture
def up() -> list[PipelineLoad]:
    return [PipelineLoad(name) for name in "abcd"]


@pytest.fixture
def e2(up: list[PipelineLoad]) -> E2Router:
    router = E2Router()
    for load in up:
        router.on_cache_report(load.name, CacheReport(0, True, capacity=100_000, costs=COSTS), 0.0)
    return router


def done(router: E2Router, request: RoutedPrompt, now: float) -> None:
    router.on_first_token(request.key, 0, now)
    router.on_request_end(request.key, 1, now)


def test_the_pipeline_with_most_cached_is_chosen(e2: E2Router, up: list[PipelineLoad]) -> None:
    homes = {}
    for family in range(4):
        first = prompt(family, 20, 2)
        home = e2.choose_pipeline(first, up, 0.0)
        homes[family], home.total_sent = home.name, home.total_sent + 1
        done(e2, first, 1.0)
    assert sorted(homes.values()) == ["a", "b", "c", "d"]
    for family in (3, 1, 2, 0):
        again = prompt(family, 20, 2)
        assert e2.choose_pipeline(again, up, 2.0).name == homes[family]
        done(e2, again, 3.0)
    assert e2.decision_counts["exploited"] == e2.decision_counts["explored"] == 4


def test_a_small_cached_share_is_ignored(e2: E2Router, up: list[PipelineLoad]) -> None:
    first, second = prompt(1, 2, 20), prompt(1, 2, 20)
    assert e2.choose_pipeline(first, up, 0.0).name == "a"
    assert e2.choose_pipeline(second, up, 0.0).name == "b"


def test_uncached_prompts_go_to_the_least_loaded(e2: E2Router, up: list[PipelineLoad]) -> None:
    long, short = prompt(1, 0, 100), prompt(2, 0, 10)
    assert [e2.choose_pipeline(each, up, 0.0).name for each in (long, short)] == ["a", "b"]
    others = [e2.choose_pipeline(prompt(3, 0, 10), up, 0.0).name for _ in range(4)]
    assert "a" not in others
    done(e2, long, 1.0)
    assert e2.choose_pipeline(prompt(3, 0, 10), up, 1.0).name == "a"


def test_a_nearly_computed_prompt_is_no_load(e2: E2Router, up: list[PipelineLoad]) -> None:
    two, long = up[:2], prompt(1, 0, 400)  # 26 seconds
    assert e2.choose_pipeline(long, two, 0.0).name == "a"
    e2.choose_pipeline(prompt(2, 0, 100), two, 0.0)  # 6 seconds
    assert e2.choose_pipeline(prompt(3, 0, 10), two, 1.0).name == "b"
    assert e2.choose_pipeline(prompt(4, 0, 100), two, 2.0).name == "b"
    assert e2.choose_pipeline(prompt(5, 0, 10), two, 24.0).name == "a"


def test_unshared_spans_do_not_count_as_eviction(e2: E2Router, up: list[PipelineLoad]) -> None:
    two = up[:2]
    for load in two:
        e2.on_cache_report(load.name, CacheReport(1, False, capacity=400 * SPAN_TOKENS), 0.0)
    old = prompt(1, 0, 400)
    e2.choose_pipeline(old, two[1:], 0.0)
    done(e2, old, 26.0)
    assert [e2.choose_pipeline(prompt(family, 0, 300), two, 26.0).name for family in (2, 3)] == [
        "a",
        "b",
    ]


def test_overloaded_pipelines_are_relieved(e2: E2Router, up: list[PipelineLoad]) -> None:
    first = prompt(1, 20, 1)
    e2.choose_pipeline(first, up, 0.0)
    done(e2, first, 1.0)
    homes = [e2.choose_pipeline(prompt(1, 20, 4), up, 2.0).name for _ in range(60)]
    assert homes[0] == "a"
    assert set(homes) == {"a", "b", "c", "d"}
    assert e2.decision_counts["redirected"] > 0
    # Each of them now has it cached.
    assert max(map(homes.count, "abcd")) <= 2 * min(map(homes.count, "abcd"))


def test_a_doubled_wait_replicates_the_prefix(e2: E2Router, up: list[PipelineLoad]) -> None:
    calm = E2Router(t_hbal=1e9)
    for load in up:
        calm.on_cache_report(load.name, CacheReport(0, True, capacity=100_000, costs=COSTS), 0.0)
    # No work precedes the first one.
    now, waited = 0.0, (0.1, 0.1, 0.1, 0.1, 0.1, 9.0, 9.0, 9.0, 9.0)
    for index, wait in enumerate(waited):
        now = 90.0 * (index // 5) + index
        again = prompt(1, 16, 1)
        assert calm.choose_pipeline(again, up, now).name == "a"
        calm.on_first_token(again.key, 0, now + wait)
        calm.on_request_end(again.key, 1, now + wait)
    assert calm.choose_pipeline(prompt(1, 16, 1), up, now + 10).name != "a"
    assert calm.decision_counts["replicated"] == 1
    assert calm.decision_counts["redirected"] == 0


def test_uncached_prompts_go_to_decode_heavy_pipelines(
    e2: E2Router, up: list[PipelineLoad]
) -> None:
    # "a" serves cached prompts with long answers, the others uncached ones.
    for load in up:
        e2.on_cache_report(
            load.name, CacheReport(1, False, costs=RequestCosts(0.001, 0.0, 0.02)), 0.0
        )
    e2.on_cache_report("a", CacheReport(1, False, tuple(range(1000, 1020))), 0.0)
    for _ in range(2):
        e2.choose_pipeline(prompt(1, 20, 0), up, 0.0)
        for load in up[1:]:
            e2.choose_pipeline(prompt(2, 0, 50), [load], 0.0)
    assert e2.choose_pipeline(prompt(3, 0, 10), up, 0.0).name == "a"


def test_evicted_spans_are_removed(e2: E2Router, up: list[PipelineLoad]) -> None:
    first = prompt(1, 20, 0)
    e2.choose_pipeline(first, up, 0.0)
    done(e2, first, 0.0)
    e2.on_cache_report("a", CacheReport(1, False, evicted_spans=tuple(first.spans)), 1.0)
    e2.on_cache_report("c", CacheReport(1, False, added_spans=tuple(first.spans)), 1.0)
    assert e2.choose_pipeline(prompt(1, 20, 0), up, 2.0).name == "c"


def test_a_full_report_keeps_recently_sent_spans(e2: E2Router, up: list[PipelineLoad]) -> None:
    old, new = prompt(1, 20, 0), prompt(2, 20, 0)
    e2.choose_pipeline(old, up[:1], 0.0)
    e2.choose_pipeline(new, up[:1], 100.0)
    e2.on_cache_report("a", CacheReport(5, True), 101.0)
    assert e2.cached_tokens("a") == 20 * SPAN_TOKENS


def test_a_removed_pipeline_returns_empty(e2: E2Router, up: list[PipelineLoad]) -> None:
    first = prompt(1, 20, 0)
    assert e2.choose_pipeline(first, up, 0.0).name == "a"
    e2.on_pipeline_removed("a")
    assert e2.choose_pipeline(first, up[1:], 1.0).name == "b"
    done(e2, first, 2.0)
    assert e2.choose_pipeline(prompt(1, 20, 0), up, 3.0).name == "b"
    assert e2.cached_tokens("a") == 0


def test_a_lost_request_is_counted_once(e2: E2Router, up: list[PipelineLoad]) -> None:
    request = prompt(1, 20, 0)
    for now in range(5):
        e2.choose_pipeline(request, up, float(now))
    e2.on_request_end(request.key, 7, 6.0)
    e2.on_request_end(request.key, 7, 6.0)
    e2.on_first_token(request.key, 0, 6.0)
    done(e2, prompt(2, 3, 0), 6.0)
    e2.validate()


@given(st.integers(0, 2**32))
def test_random_events_keep_the_invariants(seed: int) -> None:
    rng = random.Random(seed)
    router, live = E2Router(window_s=20.0), list[RoutedPrompt]()
    pipelines = [PipelineLoad(name) for name in "abc"]
    for now in range(60):
        there = rng.sample(pipelines, rng.randrange(1, 4))
        match rng.randrange(5):
            case 0:
                spans = tuple(rng.randrange(5000) for _ in range(rng.randrange(30)))
                report = CacheReport(
                    now, rng.random() < 0.2, spans, spans[::2], rng.randrange(4096)
                )
                router.on_cache_report(rng.choice("abcx"), report, now)
            case 1:
                router.on_pipeline_removed(rng.choice("abcx"))
            case 2 if live:
                done(router, live.pop(rng.randrange(len(live))), now)
            case _:
                request = prompt(rng.randrange(4), rng.randrange(9), rng.randrange(9))
                assert router.choose_pipeline(request, there, now) in there
                live.append(request)
        router.validate()
    for request in live:
        done(router, request, 61.0)
    # No work is outstanding.
    assert router.is_idle
    assert sum(router.cached_tokens(name) for name in "abcx") <= MAX_SPANS * SPAN_TOKENS
