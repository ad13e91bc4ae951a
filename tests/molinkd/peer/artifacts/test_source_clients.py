"""The hub as a source of tensors: after nearby peers, before distant ones, and not trusted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from molink.checkpoint.model_folder import ModelFolder
from molink.errors import BrokenModel, Unavailable
from molink.swarm.artifacts.sources import ModelSources
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.artifacts.model_store import ModelStore
from molinkd.peer.artifacts.source_clients import HubSource
from tests.support.fake_hub import COMMIT, REPOSITORY, FakeHub, in_place
from tests.support.fake_sources import RepositorySource, connect_to
from tests.support.models import write_plain_model

PLACE = f"{REPOSITORY}@{COMMIT}"
TENSOR = "model.layers.1.mlp.up_proj.weight"
#: Bytes read of a file before its tensors.
HEAD = 3000


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with in_place(write_plain_model(tmp_path / "model"), tmp_path / "cache", monkeypatch) as made:
        yield made


class Peer(RepositorySource):
    """A peer with the whole model; ``entries_read`` records what is read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ModelRepository())
        self.root = self.library.add_model("m", folder).manifest.root
        self.entries_read: set[str] = set()

    async def read_chunk(self, root: str, part: str, index: int) -> bytes:
        self.entries_read.add(part)
        return await super().read_chunk(root, part, index)


class Case:
    """A PC that joins, one PC with the files, and the hub."""

    def __init__(self, tmp_path: Path, *, near: bool, use_hub: bool = True) -> None:
        self.folder = tmp_path / "model"
        self.peer = Peer(self.folder)
        self.connected: list[str] = []
        self.liars: dict[str, str] = {}
        (tmp_path / "store").mkdir()
        self.store = ModelStore(
            tmp_path / "store",
            "me",
            ModelRepository(),
            connect_to({"a": self.peer, PLACE: HubSource(PLACE)}, self.connected),
            ModelRepository(),
            self.liars.__setitem__,
            is_nearby=lambda _: near,
            hub=use_hub,
        )

    async def stage(self, *, rate_limited: bool = False) -> None:
        supply = ModelSources(("a",), hub=PLACE)
        root = self.peer.root
        folder = await self.store.fetch_stage("m", root, (1, 3), supply, rate_limited=rate_limited)
        here, there = ModelFolder.open(folder, (1, 3)), ModelFolder.open(self.folder)
        for name in here.stage_tensors(1, 3):
            assert _bytes(here, folder, name) == _bytes(there, self.folder, name)


def _bytes(opened: ModelFolder, folder: Path, name: str) -> bytes:
    span = opened.tensors[name]
    return (folder / span.file).read_bytes()[span.offset :][: span.nbytes]


@pytest.mark.parametrize("rate_limited", [False, True])
async def test_a_nearby_peer_precedes_the_hub(
    tmp_path: Path, hub: FakeHub, rate_limited: bool
) -> None:
    case = Case(tmp_path, near=True)
    await case.stage(rate_limited=rate_limited)
    assert case.connected == ["a"]
    assert hub.asked == []


@pytest.mark.parametrize("rate_limited", [False, True])
async def test_the_hub_precedes_distant_peers(
    tmp_path: Path, hub: FakeHub, rate_limited: bool
) -> None:
    case = Case(tmp_path, near=False)
    await case.stage(rate_limited=rate_limited)
    assert hub.asked
    # The peer sends what only peers have: the hashes, and the files beside the weights.
    assert all("tokenizer" in part or "config" in part for part in case.peer.entries_read)
    # The hub sends ranges with the stage's tensors, and no whole file.
    assert all(asked.rpartition("-")[2] for _, asked in hub.asked)


async def test_the_hub_can_be_disabled(tmp_path: Path, hub: FakeHub) -> None:
    case = Case(tmp_path, near=False, use_hub=False)
    await case.stage()
    assert hub.asked == []


@pytest.mark.parametrize("how", ["down", "gated", "no ranges"])
async def test_peers_replace_a_failing_hub(tmp_path: Path, hub: FakeHub, how: str) -> None:
    hub.status = 503 if how == "down" else 0
    hub.gated, hub.ranges = how == "gated", how != "no ranges"
    case = Case(tmp_path, near=False)
    await case.stage()
    assert TENSOR in case.peer.entries_read
    assert case.liars == {}


async def test_altered_bytes_of_the_hub_are_rejected(tmp_path: Path, hub: FakeHub) -> None:
    hub.altered, hub.honest = True, HEAD
    case = Case(tmp_path, near=False)
    await case.stage()
    assert list(case.liars) == ["hub"]
    assert TENSOR in case.peer.entries_read


async def test_redirects_do_not_get_the_token(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 20)
    source = HubSource(PLACE)
    whole = await source.read_chunk("root", TENSOR, 0)
    assert set(hub.said) == {"Bearer hf_" + "x" * 20}
    hub.said.clear()
    hub.elsewhere = hub.url.replace("127.0.0.1", "localhost")
    for _ in range(3):
        assert await source.read_chunk("root", TENSOR, 0) == whole
    assert set(hub.said) == {""}
    hub.expired, hub.elsewhere = hub.elsewhere, ""
    assert await source.read_chunk("root", TENSOR, 0) == whole


async def test_responses_of_the_hub_are_bounded(tmp_path: Path, hub: FakeHub) -> None:
    source = HubSource(PLACE)
    whole = await source.read_chunk("root", TENSOR, 0)
    assert await source.read_slice("root", TENSOR, 0, 7, 20) == whole[7:27]
    with pytest.raises(BrokenModel, match="has no tensor other"):
        await source.read_chunk("root", "other", 0)
    hub.ranges = False
    with pytest.raises(Unavailable, match="sent no part of"):
        await source.read_chunk("root", TENSOR, 0)
