"""A release's metadata from a server is verified before anything is installed from it."""

import base64
import hashlib
from email.message import Message
from pathlib import Path

import pytest
from nacl.signing import SigningKey

from molink.errors import MolinkError, UsageError
from molinkd.cli.installation import releases
from molinkd.cli.installation.releases import download_file, fetch_release, find_url, is_newer
from tests.support.release_server import SUMS, ReleaseServer


def test_a_release_is_found_and_fetched(server: ReleaseServer, tmp_path: Path) -> None:
    wheel = server.publish("1.2.3", {"requirements.txt": b"locked"})
    found = fetch_release(server.url)
    assert (found.wheel, found.notes.version, found.notes.protocol) == (wheel, "1.2.3", 10)
    assert download_file(found, "requirements.txt", tmp_path).read_bytes() == b"locked"


@pytest.mark.parametrize("fault", ["cut", "altered", "missing", "unlisted", "endless"])
def test_another_file_is_refused_and_leaves_nothing(
    fault: str, server: ReleaseServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = server.publish("1.2.3", {})
    found = fetch_release(server.url)
    if fault == "cut":
        server.cut.add(wheel)
    elif fault == "altered":
        server.files[wheel] = b"weevil"
    elif fault == "missing":
        del server.files[wheel]
    elif fault == "unlisted":
        del found.hashes[wheel]
    else:
        monkeypatch.setattr(releases, "MAX_FILE", 3)
    said = {"missing": "answers 404", "unlisted": "does not list", "endless": "has more than"}
    with pytest.raises(MolinkError, match=said.get(fault, "does not have the hash")):
        download_file(found, wheel, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        (SUMS, b"<html>", "is no list of a release's files"),
        (SUMS, b"0" * 64 + b"  molink-1.0.0-py3-none-any.whl\n", "does not list release.json"),
        (SUMS, b"x" * ((1 << 20) + 1), "has more than 1 MiB"),
        ("release.json", b"{}", "does not have the hash"),
    ],
)
def test_a_page_that_is_no_release_is_refused(
    name: str, body: bytes, said: str, server: ReleaseServer
) -> None:
    server.publish("1.2.3", {})
    server.files[name] = body
    with pytest.raises(MolinkError, match=said):
        fetch_release(server.url)


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        (b"not JSON", "can't be read"),
        (b'{"version": "9.9.9", "protocol": 10, "state": 10}', "release.json is of 9.9.9"),
    ],
)
def test_notes_belong_to_the_wheel(notes: bytes, said: str, server: ReleaseServer) -> None:
    server.publish("1.2.3", {"release.json": notes})
    with pytest.raises(MolinkError, match=said):
        fetch_release(server.url)


def test_a_redirect_does_not_leave_https(server: ReleaseServer) -> None:
    server.publish("1.2.3", {})
    server.moved[SUMS] = "http://192.0.2.1/SHA256SUMS"
    with pytest.raises(UsageError, match="by https alone"):
        fetch_release(server.url)
    server.moved[SUMS] = f"{server.url}/elsewhere"
    server.files["elsewhere"] = server.files[SUMS]
    assert fetch_release(server.url).notes.version == "1.2.3"


def test_a_build_with_a_key_accepts_only_signed_releases(
    server: ReleaseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = SigningKey.generate()
    public = base64.b64encode(b"Ed" + b"identity" + bytes(keys.verify_key)).decode()
    monkeypatch.setattr(releases, "read_own_key", lambda: public)
    server.publish("1.2.3", {})
    with pytest.raises(MolinkError, match=r"SHA256SUMS\.minisig can't be fetched"):
        fetch_release(server.url)
    server.files[f"{SUMS}.minisig"] = sign_like_minisign(server.files[SUMS], keys)
    assert fetch_release(server.url).notes.version == "1.2.3"
    server.files[SUMS] += b"\n"
    with pytest.raises(MolinkError, match="not signed by the key"):
        fetch_release(server.url)


def sign_like_minisign(data: bytes, keys: SigningKey) -> bytes:
    signature = keys.sign(hashlib.blake2b(data).digest()).signature
    outer = keys.sign(signature + b"of a test").signature
    first, second = (
        base64.b64encode(part).decode() for part in (b"ED" + b"identity" + signature, outer)
    )
    return f"untrusted comment: x\n{first}\ntrusted comment: of a test\n{second}\n".encode()


def test_an_unreachable_server_is_reported(server: ReleaseServer) -> None:
    with pytest.raises(MolinkError, match="can't be fetched: the server answers 404"):
        fetch_release(server.url)
    with pytest.raises(MolinkError, match="can't be fetched"):
        fetch_release("http://127.0.0.1:9/x")


def test_the_server_is_an_option_or_the_packages_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Message()
    monkeypatch.setattr(releases, "metadata", lambda _: own)
    with pytest.raises(UsageError, match="--from URL"):
        find_url("")
    own["Project-URL"] = "Homepage, https://example.org"
    own["Project-URL"] = "Releases, https://example.org/molink/"
    assert find_url("") == "https://example.org/molink"
    assert find_url("https://example.net/a/") == "https://example.net/a"
    assert find_url("http://localhost:80/a") == "http://localhost:80/a"
    for unsafe in ("http://example.net", "http://localhost@example.net", "file:///etc", "ftp://a"):
        with pytest.raises(UsageError, match="by https alone"):
            find_url(unsafe)


def test_versions_are_compared_by_number() -> None:
    assert is_newer("0.10.0", "0.9.9")
    assert is_newer("1.0.0", "0.99.99")
    assert not is_newer("0.9.9", "0.10.0")
    assert not is_newer("0.9.0", "0.9.0")
