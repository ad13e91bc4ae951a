"""Profiles of real stages, and their cache."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from molink.checkpoint.model_folder import ModelFolder
from molink.facts.profile import Profile
from molink.stage import stage as stages
from molink.stage.diagnostics import stage_profile as module
from molink.stage.diagnostics.profile_cache import MAX_PROFILES, ProfileCache
from molink.stage.diagnostics.stage_passes import StagePasses
from molink.stage.diagnostics.stage_profile import profile_key, profile_stage
from molink.stage.diagnostics.timing import DECODE_ROWS
from molink.stage.graphs.capture import GraphWork
from molink.stage.stage import Stage

KV_BYTES = 1 << 24
#: A CPU stage can interleave, regardless of this measurement.
MEASURED = Profile(decode=((1, 0.25),), prefill=((16, 0.5),), tile=16)
PROFILE = structs.replace(MEASURED, interleaves=True)


@pytest.fixture(scope="module")
def folder(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    torch.set_num_threads(1)
    return ModelFolder.open(make_model(tmp_path_factory.mktemp("profile")))


@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (2, 3), (0, 3)])
def test_every_stage_of_a_ring_has_a_profile(folder: ModelFolder, layers: Any) -> None:
    stage = Stage.load_layers(folder, layers, "cpu", "f32")
    profile = profile_stage(stage, KV_BYTES, 16, seconds=0.2)
    assert profile.is_known
    assert profile.decode[0][0] == 1
    assert profile.prefill[0][0] == 8
    assert 0 < profile.decode_s(1) < 10
    assert 1 <= profile.tile <= 256


def test_measuring_leaves_no_pool(folder: ModelFolder) -> None:
    stage = Stage.load_layers(folder, (0, 3), "cpu", "f32")
    with StagePasses(stage, KV_BYTES, 16) as passes:
        passes.run_decode(128, 128)
        passes.run_prefill(512, 0)
        passes.run_prefill(64, 448)
        assert stage._pool is not None
        assert passes.max_context == 512
    assert stage._pool is None


@pytest.mark.parametrize("kv_bytes", [0, 3 * 12288])
def test_with_little_memory_requests_share_blocks(folder: ModelFolder, kv_bytes: int) -> None:
    stage = Stage.load_layers(folder, (0, 3), "cpu", "f32")
    with StagePasses(stage, kv_bytes, 16) as passes:
        assert stage._pool is not None
        assert stage._pool.blocks == max(1, kv_bytes // stage.block_bytes(16))
        passes.run_decode(8, 100)
        passes.run_prefill(100, 0)


def test_no_graph_is_made_while_a_pass_is_timed(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[GraphWork] = []

    class WorkItself:
        nbytes = 0

        def __init__(self, device: torch.device) -> None:
            self.turn = 0

        def capture_work(self, work: GraphWork, max_bytes: int) -> GraphWork:
            captured.append(work)
            return work

        def time_work(self, work: GraphWork) -> float:
            work()
            self.turn += 1
            return 2.0 if self.turn % 2 else 1.0

    monkeypatch.setattr(Stage, "_may_have_graphs", True)
    monkeypatch.setattr(stages, "CudaGraphCapturer", WorkItself)
    monkeypatch.setattr(stages, "GRAPH_BYTES", 1 << 30)
    stage = Stage.load_layers(folder, (0, 3), "cpu", "f32")
    with StagePasses(stage, KV_BYTES, 16) as passes:
        passes.capture_graphs()
        made = len(captured)
        assert made == 1 + 7  # also one row at a deep context
        for rows in DECODE_ROWS:
            passes.run_decode(rows, 128)
        passes.run_decode(1, 512 - 64)
        assert len(captured) == made


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")],
)
def test_running_out_of_device_memory_is_a_memory_error(
    folder: ModelFolder, error: Exception
) -> None:
    stage = Stage.load_layers(folder, (0, 3), "cpu", "f32")

    def compute_step(_: Any) -> Any:
        raise error

    stage.compute_step = compute_step  # type: ignore[method-assign]
    with StagePasses(stage, KV_BYTES, 16) as passes, pytest.raises(MemoryError, match="out of mem"):
        passes.run_prefill(16, 0)


def test_a_stage_is_measured_once(
    folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage.load_layers(folder, (0, 3), "cpu", "f32")
    measured = itertools.count()

    def measure(*_: Any) -> Profile:
        next(measured)
        return MEASURED

    monkeypatch.setattr(module, "measure_profile", measure)
    cache = tmp_path / "profiles"
    for _ in range(2):
        assert profile_stage(stage, KV_BYTES, 16, cache) == PROFILE
    assert next(measured) == 1
    profile_stage(stage, KV_BYTES, 8, cache)
    profile_stage(stage, KV_BYTES, 16)
    assert next(measured) == 4


def test_a_hurried_profile_is_scaled_from_other_layers(
    folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measure_profile", lambda *_: MEASURED)
    two, one, all_ = (
        Stage.load_layers(folder, layers, "cpu", "f32") for layers in ((0, 2), (1, 2), (0, 3))
    )
    other = Stage.load_layers(folder, (0, 3), "cpu", "bf16")
    assert profile_stage(two, KV_BYTES, 16, tmp_path, hurry=True) == PROFILE, "nothing to go by"
    kept = list(tmp_path.iterdir())
    predicted = profile_stage(one, KV_BYTES, 16, tmp_path, hurry=True)
    assert predicted.decode_s(1) == pytest.approx(PROFILE.decode_s(1) / 2)
    assert predicted.prefill_s(16) == pytest.approx(PROFILE.prefill_s(16) / 2)
    assert predicted.tile == PROFILE.tile
    assert list(tmp_path.iterdir()) == kept, "what was not measured is not kept"
    # The last stage also has the output head.
    longer = profile_stage(all_, KV_BYTES, 16, tmp_path, hurry=True)
    assert longer.decode_s(1) > 1.5 * PROFILE.decode_s(1)
    assert profile_stage(other, KV_BYTES, 16, tmp_path, hurry=True) == PROFILE, "none of its kin"
    assert profile_stage(one, KV_BYTES, 16, tmp_path) == PROFILE, "measured once there is time"


def test_profile_keys_differ_where_times_do(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [
        Stage.load_layers(folder, (0, 3), "cpu", "f32"),
        Stage.load_layers(folder, (0, 3), "cpu", "bf16"),
        Stage.load_layers(folder, (0, 2), "cpu", "f32"),
        Stage.load_layers(folder, (1, 3), "cpu", "f32"),
    ]
    keys = [profile_key(stage, 16) for stage in stages] + [profile_key(stages[0], 8)]
    for name, value in (("describe_device", "another"), ("_FORMAT_VERSION", 99)):
        with monkeypatch.context() as patch:
            patch.setattr(
                module, name, (lambda _: "another") if name == "describe_device" else value
            )
            keys.append(profile_key(stages[0], 16))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        keys.append(profile_key(stages[0], 16))
    assert len(set(keys)) == len(keys)
    assert keys[0] == profile_key(stages[0], 16)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\xff" * 99, b"[]", b'{"key": "a", "profile": {"decode": [[1, -1]]}}']
)
def test_a_damaged_cache_is_ignored_and_replaced(tmp_path: Path, damage: bytes) -> None:
    cache = ProfileCache(tmp_path / "new" / "folder")
    assert cache.find_profile("a") is None
    cache.store_profile("a", PROFILE)
    assert cache.find_profile("a") == PROFILE
    only_file(tmp_path / "new" / "folder").write_bytes(damage)
    assert cache.find_profile("a") is None
    cache.store_profile("a", PROFILE)
    assert cache.find_profile("a") == PROFILE


def test_a_foreign_profile_is_ignored(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.store_profile("a", PROFILE)
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"key":"a"', b'"key":"b"'))
    assert cache.find_profile("a") is None
    path.write_bytes(b" " * (1 << 20))
    assert cache.find_profile("a") is None


def test_a_cache_stays_small(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    for number in range(MAX_PROFILES + 5):
        cache.store_profile(f"key {number}", PROFILE)
    assert len(list(tmp_path.iterdir())) == MAX_PROFILES


def test_an_old_profile_that_somebody_reads_may_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ProfileCache(tmp_path)
    for number in range(MAX_PROFILES):
        cache.store_profile(f"key {number}", PROFILE)

    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(13, "in use", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)  # as Windows does
    cache.store_profile("a", PROFILE)
    assert cache.find_profile("a") == PROFILE
    assert not caplog.records


def test_an_unwritable_cache_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = ProfileCache(tmp_path / "file")
    cache.store_profile("a", PROFILE)
    assert cache.find_profile("a") is None


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: pytest -m gpu tests/stage"
)
def test_a_profile_of_a_gpu(folder: ModelFolder) -> None:
    stage = Stage.load_layers(folder, (0, 3), "cuda:0", "f32")
    profile = profile_stage(stage, KV_BYTES, 16, seconds=2.0)
    assert profile.is_known
    assert 0 < profile.decode_s(1) < 1
    assert stage._pool is None
