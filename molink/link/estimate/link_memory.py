"""Remembers link estimates across epochs and restarts."""

import contextlib
import logging
import os
from pathlib import Path
from typing import Annotated

import msgspec

from molink.facts.ring_times import LinkFacts

log = logging.getLogger(__name__)

#: Maximum links to keep, the most recently measured ones: enough for rings of several swarms.
MAX_REMEMBERED = 64
#: Seconds between writes, to spare the disk; a crash loses at most half a minute.
SAVE_INTERVAL = 30.0
#: A smaller relative change is not worth a write.
_NOTICEABLE = 0.1
#: Maximum bytes of the file; 64 links need less.
_MAX_BYTES = 1 << 16


class _Link(msgspec.Struct, frozen=True, omit_defaults=True):
    latency: Annotated[float, msgspec.Meta(gt=0, le=600)] | None = None
    rate: Annotated[float, msgspec.Meta(gt=0, le=1e12)] | None = None


class _File(msgspec.Struct, frozen=True):
    links: dict[Annotated[str, msgspec.Meta(max_length=256)], _Link]


class LinkMemory:
    """Link facts by peer, in a small JSON file.

    Several workers may share it. A file that can't be read counts as empty, and one that can't be
    written is ignored. Remembered facts are used only until the link is measured.
    """

    def __init__(self, path: Path | None) -> None:
        """Without a ``path`` nothing outlives this object."""
        self._path = path
        self._links: dict[str, LinkFacts] = {}
        #: Links measured here, and their last saved values.
        self._saved: dict[str, LinkFacts] = {}
        self._save_at = 0.0
        self._links = self._read()

    def __len__(self) -> int:
        """Known links."""
        return len(self._links)

    def find_facts(self, peer: str) -> LinkFacts:
        """Return what is known about the link to ``peer``."""
        return self._links.get(peer, LinkFacts())

    def remember_link(self, peer: str, facts: LinkFacts, now: float) -> None:
        """Remember a measurement; the file is written at intervals."""
        if facts.latency is None and facts.rate is None:
            return
        self._links.pop(peer, None)
        self._links[peer] = facts
        _bound(self._links)
        if now >= self._save_at and _differ(facts, self._saved.get(peer, LinkFacts())):
            self._save_at = now + SAVE_INTERVAL
            self._saved[peer] = facts
            _bound(self._saved)
            self._write()

    def _read(self) -> dict[str, LinkFacts]:
        if self._path is None:
            return {}
        try:
            if self._path.stat().st_size > _MAX_BYTES:
                raise ValueError(f"it exceeds {_MAX_BYTES} bytes")
            content = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("ignoring remembered links in %s: %s", self._path, error)
            return {}
        links = {peer: LinkFacts(each.latency, each.rate) for peer, each in content.links.items()}
        _bound(links)
        return links

    def _write(self) -> None:
        """Merge the links measured here into the file."""
        if self._path is None:
            return
        links = self._read()
        for peer in self._saved:
            links.pop(peer, None)
            links[peer] = self._links.get(peer, self._saved[peer])
        _bound(links)
        content = _File({peer: _Link(each.latency, each.rate) for peer, each in links.items()})
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(content))
            # Windows refuses to replace a file that is being read; retry at the next interval.
            draft.replace(self._path)
        except OSError as error:
            log.warning("can't save link estimates in %s: %s", self._path, error)
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)


def _bound(links: dict[str, LinkFacts]) -> None:
    while len(links) > MAX_REMEMBERED:
        del links[next(iter(links))]


def _differ(one: LinkFacts, other: LinkFacts) -> bool:
    return any(
        mine is not None and (its is None or abs(mine - its) > _NOTICEABLE * its)
        for mine, its in ((one.latency, other.latency), (one.rate, other.rate))
    )
