"""The report of a chaos run."""

from tools.chaos import phases
from tools.chaos.drill import Result, Verdict, list_troubles
from tools.chaos.faults import Fault
from tools.chaos.report import render_report
from tools.chaos.streams import Answer, End

KILLED = Result(
    Fault("kill-worker", 0.0),
    "worker of pc2",
    begun=10.0,
    mended=10.0,
    recovered=14.0,
    whole=16.0,
    pauses=[3.0, 3.5, 4.0],
    phases={"noticed": [0.1, 0.3], "formed": [1.0, 1.0]},
)
FROZEN = Result(
    Fault("freeze-other", 5.0), "pc3", begun=20.0, mended=25.0, pauses=[90.0], asked=[5.0]
)
SKIPPED = Result(Fault("disk-full-other", 5.0), "Linux only", skipped=True)


def answer(begun: float, ended: float, end: End) -> Answer:
    return Answer(0, "pc1", begun, ended, end, 9)


def test_a_row_counts_the_answers_that_a_fault_could_harm() -> None:
    answers = [
        answer(1.0, 9.0, "changed"),
        answer(9.0, 11.0, "same"),
        answer(9.0, 21.0, "same"),
        answer(13.0, 30.0, "lost"),
        answer(15.0, 40.0, "endpoint"),
        answer(15.0, 19.0, "changed"),
    ]
    verdict = Verdict([KILLED, FROZEN, SKIPPED], answers, [0.1, 0.2], ["it went wrong"])
    assert not verdict.good
    lines = render_report(verdict).splitlines()
    assert lines[2:6] == [
        "| none | | | | | 0.15 | 0.20 | | | |",
        "| kill-worker | 1 | 2 of 3 | 1 | 0 | 3.50 | 4.00 |  | 4.00 | 6.00 |",
        "| freeze-other | 1 | 1 of 2 | 1 | 0 | 90.00 | 90.00 | 5.00 |  | > 20 |",
        "| disk-full-other | skipped: Linux only | | | | | | | | |",
    ]
    assert lines[-9:] == [
        "6 requests, 1 of them at endpoints that were killed.",
        "",
        "Phases of the recoveries at each PC, median and 99th percentile in seconds:",
        "",
        "| fault | noticed | formed |",
        "|---|---|---|",
        "| kill-worker | 0.20, 0.30 | 1.00, 1.00 |",
        "",
        "- it went wrong",
    ]


def test_a_wrong_piece_is_told_with_the_faults_that_its_answer_lived_through() -> None:
    changed = Answer(0, "pc1", 13.0, 40.0, "changed", 9, "it is wrong", wrong_at=21.5)
    lost = Answer(1, "pc2", 15.0, 30.0, "lost", 3, "it broke")
    early = Answer(1, "pc2", 1.0, 9.0, "lost", 3, "it broke")
    assert list_troubles([changed, lost, lost, early], [KILLED, FROZEN, SKIPPED]) == [
        "freeze-other (pc3): at pc1, changed: it is wrong;"
        " after kill-worker (worker of pc2) +11.5 s, freeze-other (pc3) +1.5 s (1 times)",
        "freeze-other (pc3): at pc2, lost: it broke (2 times)",
        "no fault: at pc2, lost: it broke (1 times)",
    ]


def test_phases_are_of_pcs_that_recovered_once() -> None:
    def shown(count: float, noticed: float, weights: float) -> dict[str, float]:
        return {
            "molink_recoveries_total": count,
            "molink_recovery_noticed_timestamp_seconds": noticed,
            "molink_recovery_weights_seconds_total": weights,
            "molink_recovery_last_weights_seconds": 9.0,
        }

    before = {("pc1", 0): shown(3, 50, 7.0), ("pc2", 0): shown(1, 0, 1.0), ("pc3", 0): {}}
    after = {
        ("pc1", 0): shown(4, 101.5, 9.0),
        ("pc2", 1): shown(1, 103.0, 2.0),
        ("pc3", 0): shown(1, 103.0, 2.0),
        ("pc4", 0): {},
    }
    assert phases.compute_phases(before, after, 101.0) == {"noticed": [0.5], "weights": [2.0]}
