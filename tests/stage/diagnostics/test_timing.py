"""Measuring profiles by a fake clock: what is measured, how often, and when it ends."""

import random
from collections.abc import Callable

import pytest

from molink.facts.profile import Profile
from molink.scheduler.chunk_size import ChunkSize
from molink.stage.diagnostics.timing import DECODE_ROWS, PREFILL_ROWS, measure_profile


class Machine:
    """A fake stage whose passes advance the clock by given times."""

    def __init__(
        self,
        decode: Callable[[int, int], float] = lambda rows, context: 0.01,
        prefill: Callable[[int, int], float] = lambda rows, before: 0.02,
        max_context: int = 4096,
        max_rows: int = 4096,
    ) -> None:
        self.now = 100.0
        self.max_context = max_context
        self._times = {"decode": decode, "prefill": prefill}
        self._max_rows = max_rows
        self.ran: list[tuple[str, int, int]] = []

    def clock(self) -> float:
        return self.now

    def run_decode(self, rows: int, context: int) -> None:
        self._run("decode", rows, context)

    def run_prefill(self, rows: int, before: int) -> None:
        self._run("prefill", rows, before)

    def _run(self, kind: str, rows: int, context: int) -> None:
        assert context + (rows if kind == "prefill" else 1) <= self.max_context
        if rows > self._max_rows:
            raise MemoryError
        self.ran.append((kind, rows, context))
        self.now += self._times[kind](rows, context)


def proportional(rows: int, before: int) -> float:
    return 0.001 * rows + 1e-7 * rows * before


def test_both_tables_and_the_cost_of_context() -> None:
    machine = Machine(
        decode=lambda rows, context: 0.01 + 1e-4 * rows + 2e-6 * rows * (context - 128),
        prefill=lambda rows, before: 0.02 + 1e-4 * rows + 1e-7 * rows * before,
    )
    profile = measure_profile(machine, machine.clock, 30.0)
    assert dict(profile.decode) == pytest.approx({x: 0.01 + 1e-4 * x for x in DECODE_ROWS})
    assert dict(profile.prefill) == pytest.approx({x: 0.02 + 1e-4 * x for x in PREFILL_ROWS})
    assert profile.context == 128
    assert profile.decode_token_s == pytest.approx(2e-6)
    assert profile.prefill_token_s == pytest.approx(1e-7)
    assert profile.tile == 1


@pytest.mark.parametrize("budget", [0.0, 1.0, 5.0, 50.0])
def test_it_ends_about_in_time(budget: float) -> None:
    machine = Machine(decode=lambda rows, _: 0.3 + 0.01 * rows, prefill=proportional)
    profile = measure_profile(machine, machine.clock, budget)
    assert machine.now - 100.0 <= max(budget, 0.0) + 0.4
    assert profile.decode[0] == pytest.approx((1, 0.31))
    assert profile.prefill[0] == pytest.approx((8, 0.008))


def test_a_slow_stage_gets_one_point_of_each_kind() -> None:
    machine = Machine(decode=lambda *_: 20.0, prefill=lambda *_: 60.0)
    profile = measure_profile(machine, machine.clock, 4.0)
    assert (profile.decode, profile.prefill, profile.tile) == (((1, 20.0),), ((8, 60.0),), 1)
    assert machine.ran == [("decode", 1, 128), ("prefill", 8, 0)]


def test_the_first_point_is_measured_again() -> None:
    times = iter([0.5] * 3)
    machine = Machine(decode=lambda rows, _: next(times, 0.012) if rows == 1 else 0.012)
    assert measure_profile(machine, machine.clock, 30.0).decode_s(1) == pytest.approx(0.012)


def test_twice_the_rows_take_hardly_more_than_twice_the_time() -> None:
    machine = Machine(prefill=lambda rows, _: 5.0 if rows == 64 else 0.001 * rows)
    profile = measure_profile(machine, machine.clock, 90.0)
    assert profile.prefill_s(32) == pytest.approx(0.032)
    assert profile.prefill_s(64) <= 1.25 * 0.064 + 1e-9
    assert profile.prefill_s(128) == pytest.approx(0.128, rel=0.26)


def test_the_first_pass_warms_up_and_the_quicker_ones_count() -> None:
    times = iter([9.0, 0.012, 0.5, 0.010])
    machine = Machine(decode=lambda rows, _: next(times, 0.012) if rows == 1 else 0.012)
    profile = measure_profile(machine, machine.clock, 30.0)
    assert profile.decode_s(1) == pytest.approx(0.010)


def test_more_rows_never_take_less() -> None:
    machine = Machine(decode=lambda rows, _: 0.02 if rows == 4 else 0.01)
    profile = measure_profile(machine, machine.clock, 30.0)
    assert [seconds for _, seconds in profile.decode] == pytest.approx([0.01] * len(DECODE_ROWS))


@pytest.mark.parametrize("tile", [8, 16, 64, 128, 256])
def test_steps_of_the_matrix_products_are_found(tile: int) -> None:
    def prefill(rows: int, before: int) -> float:
        return 0.001 * -(-rows // tile)

    machine = Machine(prefill=prefill)
    found = measure_profile(machine, machine.clock, 30.0).tile
    # A step of a few per cent is hidden by noise, and not worth finding.
    assert found == (tile if tile >= 32 else 1)


def test_tiles_are_searched_in_smaller_chunks_if_time_is_short() -> None:
    def prefill(rows: int, before: int) -> float:
        return 0.1 * -(-rows // 16)

    machine = Machine(prefill=prefill)
    assert measure_profile(machine, machine.clock, 13.0).tile == 16
    tried = [rows - 1 for _, rows, _ in machine.ran if rows in (65, 129, 257)]
    assert set(tried) == {64}


def test_points_beyond_memory_are_left_out() -> None:
    machine = Machine(max_rows=300)
    profile = measure_profile(machine, machine.clock, 30.0)
    assert [rows for rows, _ in profile.prefill] == [8, 16, 32, 64, 128, 256]
    with pytest.raises(MemoryError):
        measure_profile(Machine(max_rows=4), machine.clock, 30.0)


@pytest.mark.parametrize("max_context", [2, 16, 100, 512, 2100])
def test_no_position_beyond_the_models_context(max_context: int) -> None:
    machine = Machine(prefill=lambda rows, _: 0.001 * -(-rows // 64), max_context=max_context)
    profile = measure_profile(machine, machine.clock, 30.0)
    assert profile.is_known
    assert max(rows for rows, _ in profile.prefill) <= max_context


def test_the_baseline_is_measured_again_after_start() -> None:
    times = iter([0.9, 0.5, 0.3])
    machine = Machine(decode=lambda rows, _: next(times, 0.012))
    profile = measure_profile(machine, machine.clock, 10.0)
    assert profile.decode_s(1) == pytest.approx(0.012)
    assert [rows for rows, _ in profile.decode] == list(DECODE_ROWS)


#: Seconds of a stage of eight layers on one core, as ``molink bench stage`` measures them.
PREFILL_S = {8: 8.1e-3, 16: 15.3e-3, 32: 29.4e-3, 64: 55e-3, 128: 109e-3, 256: 220e-3, 512: 451e-3}
STAGE = Profile(
    decode=((1, 6.9e-3), (8, 12e-3), (128, 120e-3)), prefill=tuple(PREFILL_S.items()), context=128
)


def choose_chunks(profile: Profile) -> list[int]:
    """Chunk sizes of a ring of three such stages: alone, with streams, and with a queue."""
    chunks = ChunkSize(0, [profile] * 3, 3)
    queued = [chunks.choose_rows(streams, 4096, 0, 512, 9000, 8) for streams in (0, 6)]
    return [chunks.choose_rows(0, 4096), chunks.choose_rows(6, 4096, 0, 512), *queued]


@pytest.mark.parametrize("seed", range(20))
def test_a_busy_moment_changes_neither_chunks_nor_the_read_rate(seed: int) -> None:
    noise = random.Random(seed)

    def slow_down(seconds: float) -> float:
        is_busy = busy.now < 100.7 or noise.random() < 0.1
        return seconds * (noise.uniform(1.5, 5) if is_busy else 1)

    busy = Machine(
        lambda rows, _: slow_down(STAGE.decode_s(rows)),
        lambda rows, _: slow_down(STAGE.prefill_s(rows)),
    )
    found = measure_profile(busy, busy.clock, 3.0)
    assert found.decode_s(1) == pytest.approx(STAGE.decode_s(1), rel=0.1)
    for rows, wanted in zip(choose_chunks(found), choose_chunks(STAGE), strict=True):
        assert 0.7 <= rows / wanted <= 1.4


def test_cpu_time_of_other_programs_does_not_count() -> None:
    machine = Machine(lambda rows, _: STAGE.decode_s(rows), lambda rows, _: STAGE.prefill_s(rows))
    profile = measure_profile(machine, lambda: 3 * machine.now, 3.0, machine.clock)
    assert dict(profile.decode) == pytest.approx({x: STAGE.decode_s(x) for x, _ in profile.decode})
    assert choose_chunks(profile) == choose_chunks(STAGE)
    assert 3 * (machine.now - 100) <= 2 * 3.0 + 3 * PREFILL_S[512]
