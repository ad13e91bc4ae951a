"""Who understands whom."""

from molink.swarm.membership.versions import (
    REPORT_TIMEOUT_S,
    IncompatiblePeers,
    PeerVersion,
    explain_mismatch,
    own_version,
)


def test_versions_that_speak_alike_may_be_together() -> None:
    assert explain_mismatch(PeerVersion("1.0", 3), PeerVersion("2.0", 3)) == ""


def test_who_has_to_be_updated() -> None:
    old, new = PeerVersion("1.0", 3), PeerVersion("2.0", 4)
    assert "Update this PC with" in explain_mismatch(old, new)
    assert "Update the other PCs" in explain_mismatch(new, old)
    for text in (explain_mismatch(old, new), explain_mismatch(new, old)):
        assert "molink 1.0 (protocol 3)" in text
        assert "molink 2.0 (protocol 4)" in text
        assert "./install.sh" in text


def test_who_is_refused_is_so_while_it_reports() -> None:
    refused, other = IncompatiblePeers(), PeerVersion("9", own_version().protocol + 1)
    assert not refused.check_version("a", other, 0.0)
    assert not refused.check_version("b", other, 1.0)
    assert refused.list_active(REPORT_TIMEOUT_S) == {"a": other, "b": other}
    assert refused.list_active(REPORT_TIMEOUT_S + 0.5) == {"b": other}
    assert refused.check_version("b", own_version(), REPORT_TIMEOUT_S + 0.6)
    assert refused.list_active(REPORT_TIMEOUT_S + 0.6) == {}
