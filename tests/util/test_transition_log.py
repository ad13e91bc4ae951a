from molink.util.transition_log import TransitionLog


def test_keeps_the_last_transitions() -> None:
    log = TransitionLog(length=2)
    for number in range(3):
        log.add_entry(float(number), "step", number, "x")
    log.add_entry(3.0, "end")
    assert log.format_lines() == ("2.000000 step 2 x", "3.000000 end")
