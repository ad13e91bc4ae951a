"""The Homebrew formula of a release names its files by their hashes.

``brew style`` of Homebrew 3.6.12 found nothing in it on 2026-11-29.
"""

import re
from pathlib import Path

import pytest

from tools import homebrew
from tools.release import ROOT, SUMS

URL = "https://example.org/molink"
ARCHIVE, REQUIREMENTS = "a" * 64, "b" * 64
LINES = f"{ARCHIVE}  molink-1.2.3.tar.gz\n{REQUIREMENTS}  requirements.txt\n"


def test_the_formula_names_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / SUMS).write_text(f"{'c' * 64}  install.sh\n{LINES}", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["homebrew", str(tmp_path), f"{URL}/"])
    homebrew.main()
    text = capsys.readouterr().out
    named = re.findall(r'^ +url "(.+)"\n +sha256 "(.+)"$', text, re.M)
    assert named == [
        (f"{URL}/molink-1.2.3.tar.gz", ARCHIVE),
        (f"{URL}/requirements.txt", REQUIREMENTS),
    ]
    assert len(re.findall(r"^ *(?:class|on_macos|resource .*do|def|test do)\b", text, re.M)) == 6
    assert "$" not in text


def test_its_python_has_wheels_of_all_packages() -> None:
    (python,) = set(re.findall(r"python@?([\d.]+)", homebrew.write_formula(LINES, URL)))
    table = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert f"\n| {python} | yes" in table


@pytest.mark.parametrize("missing", LINES.splitlines())
def test_half_a_release_is_refused(missing: str) -> None:
    with pytest.raises(SystemExit, match="no source archive"):
        homebrew.write_formula(LINES.replace(f"{missing}\n", ""), URL)
