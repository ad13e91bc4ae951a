import msgspec
import pytest

from molink.swarm.membership.sanitize import (
    is_valid_model_name,
    quote_name,
    sanitize_failure,
    sanitize_name,
    sanitize_pairings,
    sanitize_report,
)
from molink.wire.messages.instructions import PendingPairing
from molink.wire.messages.peer_reports import StageFailed, TransferState
from tests.support.fake_fleet import Kit


def test_names_are_sanitized() -> None:
    assert sanitize_name("  my PC\x1b[31m\n\u202e ", "p") == "my PC31m"
    assert sanitize_name("\0\n", "p") == "p"
    assert len(sanitize_name("x" * 200, "p")) == 64
    assert len(sanitize_name("x" * 200 + "/cuda:1", "p")) == 64


@pytest.mark.parametrize(
    "name",
    [
        "Jürgens Büro",
        "DESKTOP-4F2K_1",
        "anna.lan",
        "Anna’s PC",
        "O'Neil",
        "研究室サーバー",
        "कार्यालय",
        "Ju\N{COMBINING DIAERESIS}rgen",
        "attic/cuda:1",
        "attic/cpu.2",
    ],
)
def test_names_of_pcs_are_kept(name: str) -> None:
    assert sanitize_name(name, "p") == name


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        (
            "x (10.0.0.1) wants to join: molink approve 1111-2222",
            "x 10.0.0.1 wants to join molink approve 1111-2222",
        ),
        (
            'x" (10.0.0.1), run\n\n  molink approve 1111-2222',
            "x 10.0.0.1 run molink approve 1111-2222",
        ),
        ("x＂ （y）： ː ʺ “z” «»", "x y z"),
        ("a\u3000\u00a0b   c", "ab c"),
        ("\u3164\u2800\ufe0f", "p"),
        ("a/b/cuda:1", "ab/cuda:1"),
        ("/cuda:1", "p"),
        ("[bold]a[/bold] <b>&", "boldabold b"),
        ("\ud800a", "a"),
    ],
)
def test_names_cannot_imitate_the_text_around_them(name: str, clean: str) -> None:
    assert sanitize_name(name, "p") == clean
    assert sanitize_name(clean, "p") == clean
    assert quote_name(name).strip('"') == ("?" if clean == "p" else clean)
    assert quote_name(name).count('"') == 2


def test_pairings_are_sanitized() -> None:
    """A hostile leader reports them."""
    good = PendingPairing(name="pc", code="1111-2222", address="10.0.0.1")
    strange = PendingPairing(name='x" (', code="3333-4444", address="10.0.0.1) joined (")
    invalid = PendingPairing(name="pc", code="1; reboot", address="10.0.0.1")
    assert sanitize_pairings((good, strange, invalid)) == (
        good,
        PendingPairing(name="x", code="3333-4444", address="?"),
    )


def test_reports_are_sanitized(kit: Kit) -> None:
    report = msgspec.structs.replace(
        kit.report("a"), name="\n", addresses=("10.0.0.1", "pc.lan", "fe80::1%eth0", "x y", "a/b")
    )
    report = msgspec.structs.replace(
        report,
        stage="\x1b[2J",
        models=("toy", "\x1b[31m", ""),
        workers=(kit.worker("ready", 1, 0, (0, 6), pipeline="p1\x07"),),
        transfers=(
            TransferState(model="toy", done=1, total=2, source="n\x1bas"),
            TransferState(model="\x1b[31m", done=1, total=2),
        ),
    )
    device = msgspec.structs.replace(report.device, read_rate=float("nan"), name="\x07")
    clean = sanitize_report(msgspec.structs.replace(report, device=device), "peer", "vm-2")
    assert clean.name == "vm-2"
    assert clean.addresses == ("10.0.0.1", "pc.lan", "fe80::1%eth0")
    assert (clean.stage, clean.models) == ("none", ("toy",))
    assert [worker.pipeline for worker in clean.workers] == ["p1"]
    assert [(one.model, one.source) for one in clean.transfers] == [("toy", "nas")]
    assert (clean.device.name, clean.device.read_rate) == ("cpu", 0.0)
    assert sanitize_report(kit.report("a"), "a", "A") == kit.report("a")


@pytest.mark.parametrize(
    ("told", "believed"), [(0.0, 0.0), (2.0, 2.0), (1e-300, 0.0), (1e300, 0.0), (float("nan"), 0.0)]
)
def test_slowdowns_are_bounded(kit: Kit, told: float, believed: float) -> None:
    worker = msgspec.structs.replace(kit.worker("ready", 1, 0, (0, 6)), slowdown=told)
    (clean,) = sanitize_report(kit.report("a", worker), "a", "A").workers
    assert clean.slowdown == believed


def test_reasons_are_sanitized() -> None:
    failed = StageFailed(pipeline="p1", epoch=1, stage=0, reason="\x1b]0;PWNED\x07\n" + "x" * 999)
    clean = sanitize_failure(failed).reason
    assert clean.startswith("\\x1b]0;PWNED\\x07\\nxxx")
    assert clean.isprintable()
    assert len(clean) == 512


def test_model_names_are_validated() -> None:
    assert is_valid_model_name("Qwen/Qwen3-8B")
    assert not any(map(is_valid_model_name, ("", " ", "a\x1b[31m", "a\nb", "a\u202eb")))
