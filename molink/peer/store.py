"""Model files that come from other peers: only what is needed, resumable, whole or not at all."""

import asyncio
import logging
import os
import shutil
import struct
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from molink.errors import BrokenModel, ModelError, MolinkError, Unavailable
from molink.model.config import ModelConfig
from molink.model.folder import METADATA_FILES, REQUIRED_FILES
from molink.model.header import MAX_HEADER_BYTES, TensorSpan, parse_header
from molink.peer.fetchplan import GroupPlan, Piece, cut, group_file, group_tensors, plan_group
from molink.peer.library import Library, folder_name, listing_identity
from molink.wire.control import FileEntry
from molink.wire.secrets import private_folder

log = logging.getLogger(__name__)

#: Requests under way to one source.
IN_FLIGHT = 8
#: Disk space that is left free, in bytes.
RESERVE_BYTES = 64 << 20
MAX_METADATA_BYTES = 64 << 20
_LENGTH = struct.Struct("<Q")


class Source(Protocol):
    """A peer that holds every file of a model."""

    async def files(self, model: str) -> Sequence[FileEntry]:
        """The files of a model."""
        ...

    async def read(self, model: str, piece: Piece) -> bytes:
        """Bytes of one of them."""
        ...


#: Opens a connection to the peer of that id.
Connect = Callable[[str], AbstractAsyncContextManager[Source]]


@dataclass(slots=True)
class Progress:
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
        #: Bytes received so far.
        self.received = 0

    async def metadata(self, model: str, sources: Sequence[str]) -> Path:
        """A folder with at least config, tokenizer and chat template of a model.

        Raises:
            MolinkError: no source could give them; says what each answered.
        """
        async with self._locks[model]:
            return await self._from_any(model, sources, None, Progress())

    async def stage(
        self,
        model: str,
        layers: tuple[int, int],
        sources: Sequence[str],
        progress: Progress | None = None,
    ) -> Path:
        """A folder with all that a stage of ``layers`` (half-open) loads.

        Raises:
            MolinkError: no source could give it, or the disk is full; says what each answered.
        """
        async with self._locks[model]:
            return await self._from_any(model, sources, layers, progress or Progress())

    async def _from_any(
        self,
        model: str,
        sources: Sequence[str],
        layers: tuple[int, int] | None,
        progress: Progress,
    ) -> Path:
        held = self._library.get(model)
        if held is not None and (self._me in sources or not sources):
            return held.folder
        reasons: list[str] = []
        for peer in sources:
            if peer == self._me:
                continue
            try:
                async with self._connect(peer) as source:
                    return await self._from(source, model, layers, progress)
            except MolinkError as error:
                log.warning("%s from peer %s: %s", model, peer, error)
                reasons.append(f"{peer}: {error}")
        detail = "; ".join(reasons) or "no peer that is here holds them"
        raise Unavailable(f"the files of {model} can't be had: {detail}")

    async def _from(
        self, source: Source, model: str, layers: tuple[int, int] | None, progress: Progress
    ) -> Path:
        files = {entry.name: entry for entry in await source.files(model)}
        identity = listing_identity(files.values())
        for library in (self._library, self._bundled):
            held = library.get(model)
            if held is not None and held.identity == identity:
                return held.folder
        folder = private_folder(self._root / folder_name(model, identity))
        await self._fetch_metadata(source, model, files, folder)
        if layers is not None:
            await self._fetch_layers(source, model, files, folder, layers, progress)
        return folder

    # --- metadata ---

    async def _fetch_metadata(
        self, source: Source, model: str, files: dict[str, FileEntry], folder: Path
    ) -> None:
        missing = [name for name in REQUIRED_FILES if name not in files]
        if missing:
            raise BrokenModel(f"the source has no {missing[0]} of {model}")
        for name in METADATA_FILES:
            entry = files.get(name)
            target = folder / name
            if entry is None or (target.is_file() and target.stat().st_size == entry.size):
                continue
            if entry.size > MAX_METADATA_BYTES:
                raise BrokenModel(f"{name} of {model} is {entry.size} bytes")
            with _new_file(target) as file:
                await self._transfer(source, model, cut(name, 0, entry.size), file, Progress())

    # --- weights ---

    async def _fetch_layers(
        self,
        source: Source,
        model: str,
        files: dict[str, FileEntry],
        folder: Path,
        layers: tuple[int, int],
        progress: Progress,
    ) -> None:
        config = await asyncio.to_thread(ModelConfig.load, folder)
        groups = group_tensors(config, *layers)
        wanted = {
            group: names
            for group, names in groups.items()
            if not (folder / group_file(group)).is_file()
        }
        if not wanted:
            return
        spans = await self._headers(source, model, files)
        plans = [plan_group(group, names, spans) for group, names in wanted.items()]
        progress.total = sum(plan.nbytes for plan in plans)
        self._check_disk(progress.total)
        log.info("fetching layers %d:%d of %s (%s)", *layers, model, progress)
        for plan in plans:
            await self._fetch_group(source, model, folder, plan, progress)

    async def _fetch_group(
        self, source: Source, model: str, folder: Path, plan: GroupPlan, progress: Progress
    ) -> None:
        with _new_file(folder / plan.file) as file:
            file.write(plan.header)
            await self._transfer(source, model, plan.pieces, file, progress)
        log.info("%s of %s is here (%s)", plan.file, model, progress)

    async def _headers(
        self, source: Source, model: str, files: dict[str, FileEntry]
    ) -> dict[str, TensorSpan]:
        spans: dict[str, TensorSpan] = {}
        for name, entry in files.items():
            if name.endswith(".safetensors"):
                spans |= await self._header(source, model, entry)
        return spans

    async def _header(self, source: Source, model: str, entry: FileEntry) -> dict[str, TensorSpan]:
        if entry.size < _LENGTH.size:
            raise BrokenModel(f"{entry.name} of {model} is truncated at the source")
        prefix = await source.read(model, Piece(entry.name, 0, _LENGTH.size, 0))
        (length,) = _LENGTH.unpack(prefix)
        if length > min(MAX_HEADER_BYTES, entry.size - _LENGTH.size):
            raise BrokenModel(f"{entry.name} of {model} has no valid header at the source")
        parts = [await source.read(model, piece) for piece in cut(entry.name, _LENGTH.size, length)]
        return parse_header(Path(entry.name), b"".join(parts), entry.size)

    def _check_disk(self, nbytes: int) -> None:
        free = shutil.disk_usage(self._root).free
        if free < nbytes + RESERVE_BYTES:
            raise ModelError(
                f"the disk of {self._root} has {free / 1e9:.1f} GB free; the model's layers need "
                f"{nbytes / 1e9:.1f} GB. Free some space, or set MOLINK_HOME to another disk."
            )

    async def _transfer(
        self,
        source: Source,
        model: str,
        pieces: Iterable[Piece],
        file: BinaryIO,
        progress: Progress,
    ) -> None:
        """Read all pieces, several at a time, into their places in ``file``."""
        waiting = iter(pieces)

        async def work() -> None:
            for piece in waiting:
                data = await source.read(model, piece)
                if len(data) != piece.length:
                    raise BrokenModel(f"{len(data)} bytes came, not {piece.length}")
                file.seek(piece.target)
                file.write(data)
                progress.done += len(data)
                self.received += len(data)

        await _all(work() for _ in range(IN_FLIGHT))


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name once it is whole."""
    draft = path.with_name(f".{path.name}.part")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise ModelError(f"can't write {path}: {error}") from error
    finally:
        draft.unlink(missing_ok=True)


async def _all(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Run coroutines together; the first error ends the others and is raised as it is."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
