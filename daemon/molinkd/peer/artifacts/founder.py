"""What founding a swarm takes beyond being a peer: a model, and a coordinator that places it."""

import asyncio
import logging
import threading
from pathlib import Path
from typing import Literal

import msgspec

from molink.checkpoint.folder import ModelFolder
from molink.checkpoint.source import (
    ModelSource,
    find_model,
    is_here,
    is_repository,
    local_model,
    short_name,
)
from molink.errors import BrokenModel, MolinkError, Unavailable, UsageError
from molink.facts.model import ModelFacts
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.control import ControlMessage
from molink.wire.messages.requests import Invite, InviteRequest, ServeModel
from molink.wire.sockets.curve import KeyPair
from molinkd.peer.artifacts.hashing import in_thread
from molinkd.peer.artifacts.in_shards import keep_model, kept_model, spans
from molinkd.peer.artifacts.library import Holding, Library, watch
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.artifacts.transfers import Transfers
from molinkd.peer.home import Home
from molinkd.peer.launch import Announce, Invitation, Launch, Serving, StageNow, Trouble
from molinkd.peer.membership.addresses import is_loopback
from molinkd.peer.membership.membership import read_membership
from molinkd.peer.membership.session import CoordinatorSession
from molinkd.peer.quantize import check_files, check_quantize

log = logging.getLogger(__name__)

_RETRY_S = 1.0
#: How often a person is told how far hashing is.
_SHOW_S = 2.0
#: How often the model's files are looked at: a stat of each.
_WATCH_S = 10.0


class Founder:
    """The part of a daemon that brings a model, and for ``up`` asks for the first token too."""

    def __init__(
        self,
        launch: Launch,
        home: Home,
        keys: KeyPair,
        library: Library,
        announce: Announce,
        transfers: Transfers | None = None,
    ) -> None:
        """``transfers`` are told of what comes from the hub."""
        self._transfers = transfers or Transfers()
        #: What is being done about the model, and how far it is.
        self.state: Literal["looking", "fetching", "hashing"] = "looking"
        self.progress = Progress(source="hub")
        self._launch = launch
        self._settings = launch.settings
        self._home = home
        self._keys = keys
        self._library = library
        self._announce = announce
        self._facts: ModelFacts | None = None
        #: What ``up`` is to serve again next time.
        self.model: str | None = None
        #: Whether it served that the last time, and what else was asked for here then.
        self.again = False
        self.brought: tuple[str, ...] = ()
        self._source: ModelSource | None = None
        #: What is here already of a model in shards.
        self._kept: Holding | None = None

    async def find_model(self) -> None:
        """Find and check the model before anything is started.

        Raises:
            ModelError: it can't be found or served; says why.
            UsageError: this PC belongs to another swarm, or can't quantize as asked.
        """
        self.model = self._launch.model
        if self._launch.role == "up":
            known = read_membership(self._home.membership)
            if known is not None and not known.own:
                raise UsageError(
                    f"this PC is a member of swarm {known.swarm}: start it with "
                    f"{self._home.typed('join')}, or run {self._home.typed('leave')} first."
                )
            before = known.model if known is not None else None
            self.model = self.model or before
            self.again = before is not None and self.model == before
            self.brought = known.brought if known is not None and self.again else ()
        elif self.model is None:
            return
        source = await self._find(self.model)
        folder = await asyncio.to_thread(self._open, source)
        await asyncio.to_thread(Tokenizer.open, source.path)
        check = check_files if self._settings.stage == "none" else check_quantize
        check(self._settings.quantize, folder.config)
        facts = folder.facts(source.name)
        context = min(facts.context, self._settings.context or facts.context)
        self._facts = msgspec.structs.replace(facts, hub=source.hub, context=context)
        self._source = source
        self._announce(Serving(model=source.name, path=str(source.path), sees=folder.config.sees))
        for note in folder.config.notes:
            log.warning("%s", note)
            self._announce(Trouble(text=note))

    @property
    def facts(self) -> ModelFacts | None:
        """What placement has to know of the model; ``None`` until it is found."""
        return self._facts

    @property
    def name(self) -> str:
        """What the model is called; empty until it is found."""
        return self._source.name if self._source is not None else ""

    @property
    def path(self) -> Path | None:
        """Where the model's files are; ``None`` until it is found."""
        return None if self._source is None else self._source.path

    async def _find(self, model: str | None) -> ModelSource:
        self.state, progress = "fetching", self.progress
        if model is not None and local_model(model) is not None:
            progress.comes_from("disk, to unpack it once")
        with self._transfers.under_way(model or "", progress):
            return await in_thread(lambda stop: self._find_in_thread(model, progress, stop))

    def _find_in_thread(
        self, model: str | None, progress: Progress, stop: threading.Event
    ) -> ModelSource:
        in_shards = self._settings.hub_files
        if in_shards and model is not None and is_repository(model) and not is_here(model):
            kept = self._kept = kept_model(self._home.models, model)
            if kept is not None:
                return ModelSource(short_name(model), kept.folder, kept.manifest.hub)
        into = self._home.unpacked
        return find_model(model, progress, stop, unpack_into=into, in_shards=in_shards)

    def _open(self, source: ModelSource) -> ModelFolder:
        if self._kept is not None:
            return ModelFolder.of_heads(source.path, spans(self._kept.manifest))
        if source.shards is not None:
            return source.shards.open()
        try:
            return ModelFolder.open(source.path)
        except BrokenModel as error:
            if not source.hub:
                raise
            mend = self._home.typed(f"pull {self.model}")
            raise BrokenModel(f"{error}. {mend} fetches what is cut off") from error

    async def hash_model(self) -> None:
        """Find out which bytes the model consists of, for those who fetch it.

        Raises:
            BrokenModel: a file can't be read, or is a link that leads out of the model's folder.
        """
        source = self._source
        if source is None or self._facts is None:
            return
        if self._kept is not None or source.shards is not None:
            await asyncio.to_thread(self._offer_shards, source)
            return
        self.state = "hashing"
        progress = self.progress = Progress()
        showing = asyncio.create_task(self._show(progress))
        try:
            holding = await in_thread(
                lambda stop: self._library.add(source.name, source.path, progress, stop)
            )
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
        made = holding.manifest
        self._facts = msgspec.structs.replace(
            self._facts, root=made.root, extra_bytes=made.extra_bytes
        )

    def _offer_shards(self, source: ModelSource) -> None:
        """Have others find here what a model in shards consists of; its shards aren't here."""
        kept = self._kept
        if kept is None:
            assert source.shards is not None
            kept = keep_model(self._home.models, source.name, source.shards)
        self._library.keep(kept)
        made = kept.manifest
        assert self._facts is not None
        self._facts = msgspec.structs.replace(
            self._facts,
            root=made.root,
            extra_bytes=made.extra_bytes,
            files_bytes=sum(shard.nbytes for shard in made.shards.values()),
        )

    async def watch(self) -> None:
        """Say so when files of the model change: those who fetch them are refused then."""
        look = watch(self._library, lambda text: self._announce(Trouble(text=text)))
        while True:
            await asyncio.sleep(_WATCH_S)
            await asyncio.to_thread(look)

    async def _show(self, progress: Progress) -> None:
        while True:
            await asyncio.sleep(_SHOW_S)
            self._announce(StageNow(text=f"hashing the model's files, once: {progress}"))

    def order(self, *, again: bool = False) -> ServeModel | None:
        """What to ask the coordinator for, once the model is hashed; ``None`` without a model.

        ``again``: nobody asks for it but the daemon, which has served it before.
        """
        settings = self._settings
        if self._facts is None:
            return None
        return ServeModel(
            ref=0,
            model=self._facts,
            again=again,
            min_peers=settings.min_peers,
            dtype=settings.dtype,
            micro_batches=settings.micro_batches,
            quantize=settings.quantize,
            objective=settings.objective,
            min_stages=settings.min_stages,
        )

    async def serve(self, session: CoordinatorSession) -> None:
        """Ask the coordinator to serve the model and, for ``up``, for a join token."""
        order, settings = self.order(again=self.again), self._settings
        if order is None:
            return
        requests: list[ControlMessage] = [order]
        if self._launch.role == "up" and self._launch.invite:
            invite = InviteRequest(ref=0, ttl=settings.token_ttl, uses=settings.token_uses)
            requests.append(invite)
        for request in requests:
            while True:
                try:
                    reply = await session.request(request)
                    break
                except Unavailable as error:
                    log.info("%s", error)
                    await asyncio.sleep(_RETRY_S)
                except MolinkError as error:
                    self._announce(Trouble(text=str(error)))
                    return
            if isinstance(reply, Invite):
                self._announce(
                    Invitation(
                        token=reply.token,
                        uses=settings.token_uses,
                        discovery=settings.discovery and not is_loopback(settings.host),
                    )
                )
