from molink.util.story import Story


def test_keeps_the_last_transitions() -> None:
    story = Story(length=2)
    for number in range(3):
        story.add_entry(float(number), "step", number, "x")
    story.add_entry(3.0, "end")
    assert story.format_lines() == ("2.000000 step 2 x", "3.000000 end")
