"""Model files that come from other peers: only what is needed, resumable, whole or not at all.

A source is any member that says it holds the model. What it claims is bounded by the model's config
before it costs memory or disk, and one that keeps sending nonsense is left out for a while.
"""

import asyncio
import logging
import os
import re
import shutil
import struct
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.fields import MAX_JSON_BYTES
from molink.checkpoint.folder import METADATA_FILES, REQUIRED_FILES
from molink.checkpoint.header import TensorSpan, parse_header
from molink.checkpoint.layout import Shapes
from molink.errors import (
    BrokenModel,
    ModelError,
    MolinkError,
    Unavailable,
    UnsupportedModel,
    WireError,
)
from molink.files import patiently
from molink.swarm.backoff import Backoff
from molink.swarm.fetch_plan import FilePiece, GroupPlan, cut, group_file, group_tensors, plan_group
from molink.wire.messages.transfer import FileEntry
from molink.wire.sockets.secrets import private_folder
from molinkd.peer.library import MAX_FILES, Library, folder_name, listing_identity

log = logging.getLogger(__name__)

#: Requests under way to one source.
IN_FLIGHT = 8
#: Disk space that is left free, in bytes.
RESERVE_BYTES = 64 << 20
#: Bounds of ``tokenizer.json`` and of each other metadata file.
MAX_TOKENIZER_BYTES = MAX_JSON_BYTES
MAX_METADATA_BYTES = 16 << 20
#: Bound of all safetensors headers of a model: a thousand times what ours have.
MAX_HEADER_BYTES = 16 << 20
#: Folders of other versions of a model that are kept, beside those that are in use.
MAX_OTHERS = 2
#: Text of a source that an error message may quote, in characters.
_MAX_QUOTE = 400
_LENGTH = struct.Struct("<Q")
#: Errors that say something about the source: no honest one makes them again and again.
_FAULTS = (BrokenModel, UnsupportedModel, WireError)


class Source(Protocol):
    """A peer that holds every file of a model."""

    async def files(self, model: str) -> Sequence[FileEntry]:
        """The files of a model."""
        ...

    async def read(self, model: str, piece: FilePiece) -> bytes:
        """Bytes of one of them."""
        ...


#: Opens a connection to the peer of that id.
Connect = Callable[[str], AbstractAsyncContextManager[Source]]


@dataclass(slots=True)
class FetchProgress:
    """How far a transfer is, in bytes; kept up to date while it runs."""

    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"{self.done / 1e6:.0f} of {self.total / 1e6:.0f} MB"


class Store:
    """Gets files of models from peers and keeps them under ``root``."""

    def __init__(
        self, root: Path, me: str, library: Library, connect: Connect, bundled: Library
    ) -> None:
        """``bundled`` holds models that this PC has but doesn't serve: copies of them are used."""
        self._root = root
        self._me = me
        self._library = library
        self._bundled = bundled
        self._connect = connect
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._backoff = Backoff()
        #: Folders that were handed out: workers and the endpoint read from them.
        self._in_use: set[Path] = set()
        #: Bytes received so far.
        self.received = 0
        for left_over in root.glob(".*.part"):
            shutil.rmtree(left_over, ignore_errors=True)

    async def metadata(self, model: str, sources: Sequence[str]) -> Path:
        """A folder with at least config, tokenizer and chat template of a model.

        Raises:
            MolinkError: no source could give them; says what each answered.
        """
        async with self._locks[model]:
            return await self._from_any(model, sources, None, FetchProgress())

    async def stage(
        self,
        model: str,
        layers: tuple[int, int],
        sources: Sequence[str],
        progress: FetchProgress | None = None,
    ) -> Path:
        """A folder with all that a stage of ``layers`` (half-open) loads.

        Raises:
            MolinkError: no source could give it, or the disk is full; says what each answered.
        """
        async with self._locks[model]:
            return await self._from_any(model, sources, layers, progress or FetchProgress())

    async def _from_any(
        self,
        model: str,
        sources: Sequence[str],
        layers: tuple[int, int] | None,
        progress: FetchProgress,
    ) -> Path:
        held = self._library.get(model)
        if held is not None and (self._me in sources or not sources):
            return held.folder
        reasons: list[str] = []
        for peer in sources:
            if peer == self._me:
                continue
            left_out = self._backoff.explain(peer, time.monotonic())
            if left_out:
                reasons.append(f"{peer}: {left_out}")
                continue
            try:
                async with self._connect(peer) as source:
                    folder = await self._from(source, model, layers, progress)
            except MolinkError as error:
                reason = str(error)[:_MAX_QUOTE]
                log.warning("%s from peer %s: %s", model, peer, reason)
                reasons.append(f"{peer}: {reason}")
                if isinstance(error, _FAULTS):
                    self._backoff.failed(peer, reason, time.monotonic())
            else:
                self._in_use.add(folder)
                return folder
        detail = "; ".join(reasons) or "no peer that is here holds them"
        raise Unavailable(f"the files of {model} can't be had: {detail}")

    async def _from(
        self, source: Source, model: str, layers: tuple[int, int] | None, progress: FetchProgress
    ) -> Path:
        listed = await source.files(model)
        if len(listed) > MAX_FILES:
            raise BrokenModel(f"the source lists {len(listed)} files; a model has fewer")
        files = {entry.name: entry for entry in listed}
        identity = listing_identity(files.values())
        for library in (self._library, self._bundled):
            held = library.get(model)
            if held is not None and held.identity == identity:
                return held.folder
        folder = self._root / folder_name(model, identity)
        if not folder.is_dir():
            await asyncio.to_thread(self._prune, folder)
            await self._fetch_metadata(source, model, files, folder)
        try:
            if layers is not None:
                await self._fetch_layers(source, model, files, folder, layers, progress)
        except BaseException:
            if folder not in self._in_use and not any(folder.glob("*.safetensors")):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _prune(self, folder: Path) -> None:
        """Before ``folder`` is begun: of other versions of its model the newest few are kept."""
        model, _, identity = folder.name.rpartition("-")
        version = re.compile(rf"{re.escape(model)}-[0-9a-f]{{{len(identity)}}}\Z")
        others = [
            path
            for path in self._root.iterdir()
            if version.match(path.name) and path not in self._in_use
        ]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for old in others[MAX_OTHERS:]:
            log.info("removing %s: newer versions of the model are here", old)
            shutil.rmtree(old, ignore_errors=True)

    # --- metadata ---

    async def _fetch_metadata(
        self, source: Source, model: str, files: dict[str, FileEntry], folder: Path
    ) -> None:
        """Fetch all but weights into ``folder``, which appears once that is whole and sound."""
        entries = _metadata(model, files)
        self._check_disk(sum(entry.size for entry in entries))
        draft = private_folder(folder.with_name(f".{folder.name}.part"))
        try:
            for entry in entries:
                async with _new_file(draft / entry.name) as file:
                    pieces = cut(entry.name, 0, entry.size)
                    await self._transfer(source, model, pieces, file, FetchProgress())
            await asyncio.to_thread(ModelConfig.load, draft)
            await asyncio.to_thread(patiently, lambda: draft.rename(folder))
        except OSError as error:
            raise ModelError(f"can't make {folder}: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    # --- weights ---

    async def _fetch_layers(
        self,
        source: Source,
        model: str,
        files: dict[str, FileEntry],
        folder: Path,
        layers: tuple[int, int],
        progress: FetchProgress,
    ) -> None:
        wanted = await asyncio.to_thread(_missing, folder, layers)
        if not wanted:
            return
        spans = await self._headers(source, model, files)
        plans = await asyncio.to_thread(_plan, folder, wanted, spans)
        progress.total = sum(plan.nbytes for plan in plans)
        self._check_disk(progress.total)
        log.info("fetching layers %d:%d of %s (%s)", *layers, model, progress)
        for plan in plans:
            await self._fetch_group(source, model, folder, plan, progress)

    async def _fetch_group(
        self, source: Source, model: str, folder: Path, plan: GroupPlan, progress: FetchProgress
    ) -> None:
        async with _new_file(folder / plan.file) as file:
            await asyncio.to_thread(file.write, plan.header)
            await self._transfer(source, model, plan.pieces(), file, progress)
        log.info("%s of %s is here (%s)", plan.file, model, progress)

    async def _headers(
        self, source: Source, model: str, files: dict[str, FileEntry]
    ) -> dict[str, TensorSpan]:
        spans: dict[str, TensorSpan] = {}
        left = MAX_HEADER_BYTES
        for name, entry in files.items():
            if name.endswith(".safetensors"):
                raw = await self._header(source, model, entry, left)
                left -= len(raw)
                spans |= await asyncio.to_thread(parse_header, Path(name), raw, entry.size)
        return spans

    async def _header(self, source: Source, model: str, entry: FileEntry, maximum: int) -> bytes:
        if entry.size < _LENGTH.size:
            raise BrokenModel(f"{entry.name} of {model} is truncated at the source")
        prefix = await _read(source, model, FilePiece(entry.name, 0, _LENGTH.size, 0))
        (length,) = _LENGTH.unpack(prefix)
        if length > min(maximum, entry.size - _LENGTH.size):
            raise BrokenModel(f"{entry.name} of {model} has no valid header at the source")
        pieces = cut(entry.name, _LENGTH.size, length)
        return b"".join([await _read(source, model, piece) for piece in pieces])

    def _check_disk(self, nbytes: int) -> None:
        free = shutil.disk_usage(self._root).free
        if free < nbytes + RESERVE_BYTES:
            raise ModelError(
                f"the disk of {self._root} has {free / 1e9:.1f} GB free; the model's files need "
                f"{nbytes / 1e9:.1f} GB. Free some space, or set MOLINK_HOME to another disk."
            )

    async def _transfer(
        self,
        source: Source,
        model: str,
        pieces: Iterable[FilePiece],
        file: BinaryIO,
        progress: FetchProgress,
    ) -> None:
        """Read all pieces, several at a time, into their places in ``file``."""
        waiting = iter(pieces)
        turn = asyncio.Lock()

        def write(piece: FilePiece, data: bytes) -> None:
            file.seek(piece.target)
            file.write(data)

        async def work() -> None:
            for piece in waiting:
                data = await _read(source, model, piece)
                async with turn:
                    await asyncio.to_thread(write, piece, data)
                progress.done += len(data)
                self.received += len(data)

        await _all(work() for _ in range(IN_FLIGHT))


def _metadata(model: str, files: dict[str, FileEntry]) -> list[FileEntry]:
    """What is to be fetched of a model beside weights."""
    missing = [name for name in REQUIRED_FILES if name not in files]
    if missing:
        raise BrokenModel(f"the source has no {missing[0]} of {model}")
    entries = [files[name] for name in METADATA_FILES if name in files]
    for entry in entries:
        maximum = MAX_TOKENIZER_BYTES if entry.name == "tokenizer.json" else MAX_METADATA_BYTES
        if entry.size > maximum:
            raise BrokenModel(
                f"{entry.name} of {model} has {entry.size} bytes, more than {maximum}"
            )
    return entries


def _plan(folder: Path, wanted: dict[str, Shapes], spans: dict[str, TensorSpan]) -> list[GroupPlan]:
    """The files that are to be written, one for each group."""
    quantized = ModelConfig.load(folder).quantized
    return [plan_group(group, shapes, spans, quantized) for group, shapes in wanted.items()]


def _missing(folder: Path, layers: tuple[int, int]) -> dict[str, Shapes]:
    """Tensors of a stage by group, of the groups that aren't here yet."""
    groups = group_tensors(ModelConfig.load(folder), *layers)
    return {
        group: shapes
        for group, shapes in groups.items()
        if not (folder / group_file(group)).is_file()
    }


async def _read(source: Source, model: str, piece: FilePiece) -> bytes:
    data = await source.read(model, piece)
    if len(data) != piece.length:
        raise BrokenModel(f"{len(data)} bytes came, not {piece.length}")
    return data


@asynccontextmanager
async def _new_file(path: Path) -> AsyncIterator[BinaryIO]:
    """A file that appears under its name once it is whole; disks are waited for in threads."""
    draft = path.with_name(f".{path.name}.part")

    def finish() -> None:
        file.flush()
        os.fsync(file.fileno())

    try:
        with draft.open("wb") as file:
            yield file
            await asyncio.to_thread(finish)
        await asyncio.to_thread(patiently, lambda: draft.replace(path))
    except OSError as error:
        raise ModelError(f"can't write {path}: {error}") from error
    finally:
        patiently(lambda: draft.unlink(missing_ok=True))


async def _all(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Run coroutines together; the first error ends the others and is raised as it is."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
