"""Finds and fetches releases: a folder of files on a web server, made by ``tools/release.py``."""

import hashlib
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from molink.errors import MolinkError, UsageError
from molinkd.cli.installation.signatures import check_signature, read_own_key

SUMS = "SHA256SUMS"
WHEEL = re.compile(r"molink-(\d+(?:\.\d+){2})-py3-none-any\.whl")
#: Maximum response sizes, in bytes.
_MAX_TEXT, MAX_FILE = 1 << 20, 1 << 30
_TIMEOUT_S = 60.0
_CHUNK = 1 << 20
_SUM = re.compile(r"([0-9a-f]{64}) [ *]([A-Za-z0-9][\w.-]{0,127})")

T = TypeVar("T")


class ReleaseNotes(msgspec.Struct, frozen=True):
    """``release.json``: a version, and what it speaks and writes."""

    version: str
    protocol: int
    state: int


@dataclass(frozen=True, slots=True)
class PublishedRelease:
    """A release: its address, its notes about itself, and the hashes of its files by name."""

    url: str
    wheel: str
    notes: ReleaseNotes
    hashes: dict[str, str]


def find_url(given: str) -> str:
    """Where releases are: as ``given``, or as the installed package says.

    Raises:
        UsageError: nothing says it, or others could alter what comes from there.
    """
    url = (given or read_own_url()).rstrip("/")
    if not url:
        raise UsageError(
            "this molink does not say where its releases are: name the place with --from URL"
        )
    parts = urlsplit(url)
    if parts.scheme != "https" and not (
        parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost")
    ):
        raise UsageError(f"releases come by https alone, not from {url}")
    return url


def read_own_url() -> str:
    """The place in the package's metadata; empty if there is none."""
    try:
        links = metadata("molink").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    found = [link.partition(", ") for link in links]
    return next((url for name, _, url in found if name == "Releases"), "")


def fetch_release(url: str) -> PublishedRelease:
    """Ask what the newest release at ``url`` is.

    A molink that was released with a key accepts only what that key has signed.

    Raises:
        MolinkError: the server can't be reached, or answers with something else.
    """
    sums = _read_text(f"{url}/{SUMS}")
    if key := read_own_key():
        check_signature(sums.encode(), _read_text(f"{url}/{SUMS}.minisig"), key)
    hashes = {name: digest for digest, name in _SUM.findall(sums)}
    wheels = [name for name in hashes if WHEEL.fullmatch(name)]
    if len(wheels) != 1:
        raise MolinkError(f"{url}/{SUMS} is no list of a release's files")
    body = _read_text(f"{url}/release.json").encode()
    _check_hash("release.json", hashlib.sha256(body).hexdigest(), hashes, url)
    try:
        notes = msgspec.json.decode(body, type=ReleaseNotes)
    except msgspec.MsgspecError as error:
        raise MolinkError(f"{url}/release.json can't be read: {error}") from error
    found = WHEEL.fullmatch(wheels[0])
    if found is None or found[1] != notes.version:
        raise MolinkError(f"{url} has {wheels[0]}, but its release.json is of {notes.version}")
    return PublishedRelease(url, wheels[0], notes, hashes)


def download_file(release: PublishedRelease, name: str, folder: Path) -> Path:
    """Fetch a file of a release into ``folder`` and compare its hash.

    Raises:
        MolinkError: it can't be fetched, or is another one; nothing is left.
    """
    path = folder / name
    digest = hashlib.sha256()

    def save(answer: IO[bytes]) -> None:
        size = 0
        with path.open("wb") as file:
            while chunk := answer.read(_CHUNK):
                size += len(chunk)
                if size > MAX_FILE:
                    raise MolinkError(f"{release.url}/{name} has more than {MAX_FILE >> 20} MiB")
                digest.update(chunk)
                file.write(chunk)

    try:
        _request(f"{release.url}/{name}", save)
        _check_hash(name, digest.hexdigest(), release.hashes, release.url)
    except MolinkError:
        path.unlink(missing_ok=True)
        raise
    return path


def is_newer(version: str, than: str) -> bool:
    """Whether a version such as ``0.10.0`` comes after another one."""
    return _parse_version(version) > _parse_version(than)


def _parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _read_text(url: str) -> str:
    def read(answer: IO[bytes]) -> bytes:
        return answer.read(_MAX_TEXT + 1)

    body = _request(url, read)
    if len(body) > _MAX_TEXT:
        raise MolinkError(f"{url} has more than {_MAX_TEXT >> 20} MiB")
    return body.decode("utf-8", "replace")


def _check_hash(name: str, found: str, hashes: dict[str, str], url: str) -> None:
    if name not in hashes:
        raise MolinkError(f"{url}/{SUMS} does not list {name}")
    if found != hashes[name]:
        raise MolinkError(
            f"{name} from {url} does not have the hash that {SUMS} says: it was cut off or "
            "altered, or a new release appeared meanwhile. Run this again later"
        )


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but none that leave https."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: Any,
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Refuse what :func:`find_url` refuses."""
        find_url(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _request(url: str, consume: Callable[[IO[bytes]], T]) -> T:
    """Open ``url`` and hand what comes to ``consume``."""
    opener = urllib.request.build_opener(_SecureRedirects)
    try:
        with opener.open(url, None, _TIMEOUT_S) as answer:
            return consume(answer)
    except urllib.error.HTTPError as error:
        error.close()
        raise MolinkError(f"{url} can't be fetched: the server answers {error.code}") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise MolinkError(f"{url} can't be fetched: {reason}") from error
