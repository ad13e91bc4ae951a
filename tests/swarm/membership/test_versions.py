"""Who understands whom."""

from molink.swarm.membership.versions import GONE_S, RefusedPeers, Spoken, mismatch, ours


def test_versions_that_speak_alike_may_be_together() -> None:
    assert mismatch(Spoken("1.0", 3), Spoken("2.0", 3)) == ""


def test_who_has_to_be_updated() -> None:
    old, new = Spoken("1.0", 3), Spoken("2.0", 4)
    assert "Update this PC with" in mismatch(old, new)
    assert "Update the other PCs" in mismatch(new, old)
    for text in (mismatch(old, new), mismatch(new, old)):
        assert "molink 1.0 (protocol 3)" in text
        assert "molink 2.0 (protocol 4)" in text
        assert "./install.sh" in text


def test_who_is_refused_is_so_while_it_reports() -> None:
    refused, other = RefusedPeers(), Spoken("9", ours().protocol + 1)
    assert not refused.heard("a", other, 0.0)
    assert not refused.heard("b", other, 1.0)
    assert refused.at(GONE_S) == {"a": other, "b": other}
    assert refused.at(GONE_S + 0.5) == {"b": other}
    assert refused.heard("b", ours(), GONE_S + 0.6)
    assert refused.at(GONE_S + 0.6) == {}
