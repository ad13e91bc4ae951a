"""Which facts of links are stored, and which are not."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.facts.ring_times import LinkFacts
from molink.link.estimate.link_memory import MAX_REMEMBERED, SAVE_INTERVAL, LinkMemory

FACTS = LinkFacts(0.03, 12.5e6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "links" / "peers.json"


def test_measurement_survives_a_restart(path: Path) -> None:
    memory = LinkMemory(path)
    assert memory.find_facts("a") == LinkFacts()
    memory.remember_link("a", FACTS, 0.0)
    assert memory.find_facts("a") == LinkMemory(path).find_facts("a") == FACTS
    assert [each.name for each in path.parent.iterdir()] == ["peers.json"]


def test_memory_without_a_path_is_not_saved() -> None:
    memory = LinkMemory(None)
    memory.remember_link("a", FACTS, 0.0)
    assert memory.find_facts("a") == FACTS


def test_file_is_written_at_intervals_on_changes(path: Path) -> None:
    memory = LinkMemory(path)
    memory.remember_link("a", FACTS, 0.0)
    memory.remember_link("a", LinkFacts(0.03, 2.5e6), SAVE_INTERVAL - 1)
    assert LinkMemory(path).find_facts("a") == FACTS
    memory.remember_link("a", LinkFacts(0.03, 2.5e6), SAVE_INTERVAL)
    assert LinkMemory(path).find_facts("a") == LinkFacts(0.03, 2.5e6)
    path.unlink()
    memory.remember_link("a", LinkFacts(0.031, 2.5e6), 10 * SAVE_INTERVAL)
    assert not path.exists()
    assert memory.find_facts("a") == LinkFacts(0.031, 2.5e6)


def test_unknown_facts_keep_remembered_ones(path: Path) -> None:
    memory = LinkMemory(path)
    memory.remember_link("a", FACTS, 0.0)
    memory.remember_link("a", LinkFacts(), 100.0)
    assert memory.find_facts("a") == FACTS


def test_two_workers_share_a_file(path: Path) -> None:
    first, second = LinkMemory(path), LinkMemory(path)
    first.remember_link("a", FACTS, 0.0)
    second.remember_link("b", FACTS, 0.0)
    memory = LinkMemory(path)
    assert memory.find_facts("a") == memory.find_facts("b") == FACTS


def test_most_recent_links_are_kept(path: Path) -> None:
    memory = LinkMemory(path)
    memory.remember_link("first", FACTS, 0.0)
    for number in range(MAX_REMEMBERED - 1):
        memory.remember_link(f"peer {number}", FACTS, 100.0 * number)
    memory.remember_link("first", FACTS, 0.0)
    memory.remember_link("last", FACTS, 1e6)
    assert len(memory) == len(LinkMemory(path)) == MAX_REMEMBERED
    assert memory.find_facts("first") == FACTS
    assert memory.find_facts("peer 0") == LinkFacts()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense",
        b"\xff\xfe",
        b"[]",
        b'{"links": []}',
        b'{"links": {"a": {"rate": 0}}}',
        b'{"links": {"a": {"latency": -1}}}',
        b'{"links": {"a": {"rate": 1e400}}}',
        b'{"links": {"a": {"rate": NaN}}}',
        b'{"links": {"a": {"latency": "long"}}}',
        b'{"links": {"' + b"a" * 1000 + b'": {}}}',
        b"[" * 60_000,
        b" " * 70_000 + b'{"links": {}}',
    ],
)
def test_invalid_file_counts_as_empty(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    memory = LinkMemory(path)
    assert len(memory) == 0
    memory.remember_link("a", FACTS, 0.0)
    assert LinkMemory(path).find_facts("a") == FACTS


def test_unwritable_folder_is_ignored(tmp_path: Path) -> None:
    in_the_way = tmp_path / "links"
    in_the_way.write_bytes(b"")
    memory = LinkMemory(in_the_way / "peers.json")
    memory.remember_link("a", FACTS, 0.0)
    assert memory.find_facts("a") == FACTS


@given(st.binary(max_size=200))
def test_any_file_content_is_tolerated(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("links") / "peers.json"
    path.write_bytes(content)
    assert len(LinkMemory(path)) <= MAX_REMEMBERED
