import pytest

from molink.util.change_detector import differs


@pytest.mark.parametrize(
    ("one", "other", "absolute", "expected"),
    [
        (1.0, 1.2, 0.0, False),
        (1.0, 1.3, 0.0, True),
        (1.3, 1.0, 0.0, True),
        (1.0, 1.3, 0.5, False),
        (0.0, 0.0, 0.0, False),
        (0.0, 1.0, 0.0, True),
    ],
)
def test_both_thresholds_must_be_exceeded(
    one: float, other: float, absolute: float, expected: bool
) -> None:
    assert differs(one, other, 0.2, absolute) is expected
