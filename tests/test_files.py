import pytest

from molink import files
from molink.files import make_plain_name, retry_while_busy


class Locked:
    """An act that is not permitted a few times."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self) -> str:
        self.left -= 1
        if self.left >= 0:
            raise PermissionError("in use")
        return "done"


def test_retries_are_for_windows_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PAUSE_S", 0.0)
    monkeypatch.setattr(files, "_IS_WINDOWS", False)
    with pytest.raises(PermissionError):
        retry_while_busy(Locked(1))
    monkeypatch.setattr(files, "_IS_WINDOWS", True)
    assert retry_while_busy(Locked(3)) == "done"
    with pytest.raises(PermissionError):
        retry_while_busy(Locked(1), 0.0)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("p1", "p1"),
        ("../../x", "x"),
        ("a:b\\c", "a_b_c"),
        ("con", "_con"),
        ("LPT1.v2", "_LPT1.v2"),
        ("cond", "cond"),
        ("...", "otherwise"),
    ],
)
def test_plain_names(text: str, plain: str) -> None:
    assert make_plain_name(text, "otherwise") == plain
