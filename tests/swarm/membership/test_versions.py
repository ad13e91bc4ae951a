"""Protocol compatibility."""

from molink.swarm.membership.versions import (
    REPORT_TIMEOUT_S,
    IncompatiblePeers,
    PeerVersion,
    explain_mismatch,
    own_version,
)


def test_versions_with_one_protocol_are_compatible() -> None:
    assert explain_mismatch(PeerVersion("1.0", 3), PeerVersion("2.0", 3)) == ""


def test_mismatch_names_the_side_to_update() -> None:
    old, new = PeerVersion("1.0", 3), PeerVersion("2.0", 4)
    assert "Update this PC with" in explain_mismatch(old, new)
    assert "Update the other PCs" in explain_mismatch(new, old)
    for text in (explain_mismatch(old, new), explain_mismatch(new, old)):
        assert "molink 1.0 (protocol 3)" in text
        assert "molink 2.0 (protocol 4)" in text
        assert "`molink update`" in text


def test_incompatible_peers_are_listed_while_they_report() -> None:
    refused, other = IncompatiblePeers(), PeerVersion("9", own_version().protocol + 1)
    assert not refused.check_version("a", other, 0.0)
    assert not refused.check_version("b", other, 1.0)
    assert refused.list_active(REPORT_TIMEOUT_S) == {"a": other, "b": other}
    assert refused.list_active(REPORT_TIMEOUT_S + 0.5) == {"b": other}
    assert refused.check_version("b", own_version(), REPORT_TIMEOUT_S + 0.6)
    assert refused.list_active(REPORT_TIMEOUT_S + 0.6) == {}
