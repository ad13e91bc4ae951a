"""The manifest for winget names the setup program by its hash."""

import hashlib
from pathlib import Path

import pytest
import yaml

import molink
from tools import winget


def test_the_manifest_names_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setup, url = tmp_path / "setup.exe", "https://example.org/setup.exe"
    setup.write_bytes(b"MZ")
    monkeypatch.setattr("sys.argv", ["winget", str(setup), url])
    winget.main()
    found = yaml.safe_load(capsys.readouterr().out)
    (installer,) = found["Installers"]
    assert found["PackageVersion"] == molink.__version__
    assert installer["InstallerUrl"] == url
    assert installer["InstallerSha256"].lower() == hashlib.sha256(b"MZ").hexdigest()
