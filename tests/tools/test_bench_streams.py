"""How late a loop was, out of two readings of a histogram."""

from tools.bench_streams import delays

INF = float("inf")


def test_the_looks_between_two_readings() -> None:
    before = {0.001: 5.0, 0.02: 6.0, 0.05: 9.0, INF: 10.0}
    after = {0.001: 5.0, 0.02: 204.0, 0.05: 208.0, INF: 210.0}
    assert delays(before, after) == {"looks": 200, "delay p99 ms at most": 20.0, "share": 0.99}
    after[0.02] = 203.0
    assert delays(before, after)["delay p99 ms at most"] == 50.0
