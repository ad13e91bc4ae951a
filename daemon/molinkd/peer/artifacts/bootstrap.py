"""Finds and hashes the model that this PC provides, and asks the coordinator to serve it."""

import asyncio
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_names import short_name
from molink.checkpoint.quantize_check import check_quantize, check_quantize_files
from molink.errors import BrokenModel, MolinkError, Unavailable, UsageError
from molink.facts.model import ModelFacts
from molink.wire.messages.admin import InviteReply, InviteRequest, ServeModel
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.artifacts.hashing import run_in_thread
from molinkd.peer.artifacts.model_repository import ModelFiles, ModelRepository, make_change_watcher
from molinkd.peer.artifacts.sharded_model import find_stored_model, store_model, tensor_spans
from molinkd.peer.artifacts.transfers import Progress, Transfers
from molinkd.peer.home import Home
from molinkd.peer.launch import (
    Announce,
    Launch,
    ModelFoundEvent,
    ProblemReportedEvent,
    StageStatusChangedEvent,
    SwarmOpenedEvent,
)
from molinkd.peer.membership.addresses import is_loopback
from molinkd.peer.membership.membership_record import read_membership
from molinkd.peer.membership.session import CoordinatorSession
from molinkd.peer.settings import AUTO_EXPERT_MEMORY
from molinkd.tasks import cancel_tasks

if TYPE_CHECKING:
    from molink.checkpoint.model_source import ModelSource

log = logging.getLogger(__name__)

_RETRY_S = 1.0
#: Lifetime of the token of ``Launch.invite``, in seconds.
_TOKEN_S = 3600.0
#: Interval of hashing progress events, in seconds.
_PROGRESS_INTERVAL_S = 2.0
#: Interval of checking the model's files for changes, in seconds.
_CHECK_INTERVAL_S = 10.0


class Bootstrap:
    """Provides one model; for ``up`` it also requests the first join token."""

    def __init__(
        self,
        launch: Launch,
        home: Home,
        keys: KeyPair,
        repository: ModelRepository,
        announce: Announce,
        transfers: Transfers | None = None,
    ) -> None:
        """``transfers`` tracks downloads from the hub."""
        self._transfers = transfers or Transfers()
        #: Current step and its progress.
        self.state: Literal["looking", "fetching", "hashing"] = "looking"
        self.progress = Progress(source="hub")
        self._launch = launch
        self._settings = launch.settings
        self._home = home
        self._keys = keys
        self._library = repository
        self._announce = announce
        self._facts: ModelFacts | None = None
        #: The model that the next ``up`` serves.
        self.model: str | None = None
        #: Whether the last run served that model too, and which further models it provided.
        self.is_resumed = False
        self.extra_models: tuple[str, ...] = ()
        #: Folders of the model's adapters.
        self._adapters = launch.settings.adapters
        self._source: ModelSource | None = None
        #: Stored files of a model in shards.
        self._stored: ModelFiles | None = None

    async def find_model(self) -> None:
        """Find and validate the model.

        Raises:
            ModelError: It can't be found or is not supported.
            UsageError: This PC belongs to another swarm, or can't quantize as requested.
        """
        self.model = self._launch.model
        if self._launch.role == "up":
            known = read_membership(self._home.membership)
            if known is not None and not known.is_founder:
                raise UsageError(
                    f"this PC is a member of swarm {known.swarm}: start it with "
                    f"{self._home.format_command('join')}, or run "
                    f"{self._home.format_command('leave')} first."
                )
            before = known.model if known is not None else None
            self.model = self.model or before
            self.is_resumed = before is not None and self.model == before
            if known is not None and self.is_resumed and self.model is not None:
                self.extra_models = known.extra_models
                if self._launch.model is None:
                    self._adapters = self._adapters or known.adapters.get(self.model, {})
        elif self.model is None:
            return
        from molink.text.tokenizer import Tokenizer

        source = await self._find_source(self.model)
        folder = await asyncio.to_thread(self._open_folder, source)
        await asyncio.to_thread(Tokenizer.open, source.path)
        check = check_quantize_files if self._settings.stage == "none" else check_quantize
        check(self._settings.quantize, folder.config)
        facts = folder.placement_facts(source.name)
        if facts.experts is None and self._settings.expert_memory not in (0, AUTO_EXPERT_MEMORY):
            raise UsageError(
                f"--expert-memory is for mixtures, and {source.name} has no experts: leave it out, "
                "or say auto"
            )
        context = min(facts.max_model_len, self._settings.max_model_len or facts.max_model_len)
        self._facts = msgspec.structs.replace(facts, hub=source.hub_place, max_model_len=context)
        self._source = source
        self._announce(
            ModelFoundEvent(
                model=source.name,
                path=str(source.path),
                is_text_only=folder.config.is_text_only,
                adapters=tuple(adapter.name for adapter in folder.config.adapters),
            )
        )
        for note in folder.config.notes:
            log.warning("%s", note)
            self._announce(ProblemReportedEvent(text=note))

    @property
    def facts(self) -> ModelFacts | None:
        """The model's description for placement; ``None`` until it is found."""
        return self._facts

    @property
    def name(self) -> str:
        """The model's name; empty until it is found."""
        return self._source.name if self._source is not None else ""

    @property
    def path(self) -> Path | None:
        """The model's folder; ``None`` until it is found."""
        return None if self._source is None else self._source.path

    async def _find_source(self, model: str | None) -> "ModelSource":
        from molink.checkpoint.model_source import find_local_model

        self.state, progress = "fetching", self.progress
        if model is not None and find_local_model(model) is not None:
            progress.set_source("disk (unpacking)")
        with self._transfers.track_transfer(model or "", progress):
            return await run_in_thread(lambda stop: self._find_in_thread(model, progress, stop))

    def _find_in_thread(
        self, model: str | None, progress: Progress, stop: threading.Event
    ) -> "ModelSource":
        from molink.checkpoint.model_source import (
            ModelSource,
            find_model,
            is_local,
            is_repository,
        )

        # Only this PC has the adapters, so the model they change is whole here.
        in_shards = self._settings.hub_files and not self._adapters
        if in_shards and model is not None and is_repository(model) and not is_local(model):
            kept = self._stored = find_stored_model(self._home.models, model)
            if kept is not None:
                return ModelSource(short_name(model), kept.folder, kept.manifest.hub)
        into = self._home.unpacked
        found = find_model(model, progress, stop, unpack_into=into, in_shards=in_shards)
        if not self._adapters:
            return found
        from molink.checkpoint.adapted_folder import adapt_model

        folders = {name: Path(folder) for name, folder in self._adapters.items()}
        return ModelSource(found.name, adapt_model(found.name, found.path, folders, into))

    def _open_folder(self, source: "ModelSource") -> ModelFolder:
        if self._stored is not None:
            return ModelFolder.open_remote(source.path, tensor_spans(self._stored.manifest))
        if source.shards is not None:
            return source.shards.open_folder()
        try:
            return ModelFolder.open(source.path)
        except BrokenModel as error:
            if not source.hub_place:
                raise
            mend = self._home.format_command(f"pull {self.model}")
            raise BrokenModel(f"{error}. {mend} completes the download") from error

    async def hash_model(self) -> None:
        """Hash the model's files, so that other peers can fetch and verify them.

        Raises:
            BrokenModel: A file can't be read or links outside the model's folder.
        """
        source = self._source
        if source is None or self._facts is None:
            return
        if self._stored is not None or source.shards is not None:
            await asyncio.to_thread(self._offer_shards, source)
            return
        self.state = "hashing"
        progress = self.progress = Progress()
        showing = asyncio.create_task(self._announce_progress(progress))
        try:
            model_files = await run_in_thread(
                lambda stop: self._library.add_model(source.name, source.path, progress, stop)
            )
        finally:
            await cancel_tasks(showing)
        made = model_files.manifest
        self._facts = msgspec.structs.replace(
            self._facts, root=made.root, extra_bytes=made.extra_bytes
        )

    def _offer_shards(self, source: "ModelSource") -> None:
        """Offer the manifest and metadata of a model in shards; its shards stay on the hub."""
        kept = self._stored
        if kept is None:
            assert source.shards is not None
            kept = store_model(self._home.models, source.name, source.shards)
        self._library.add_partial_model(kept)
        made = kept.manifest
        assert self._facts is not None
        self._facts = msgspec.structs.replace(
            self._facts,
            root=made.root,
            extra_bytes=made.extra_bytes,
            files_bytes=sum(shard.nbytes for shard in made.shards.values()),
        )

    async def watch_files(self) -> None:
        """Report files of the model that change; peers' reads of them fail from then on."""
        look = make_change_watcher(
            self._library, lambda text: self._announce(ProblemReportedEvent(text=text))
        )
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            await asyncio.to_thread(look)

    async def _announce_progress(self, progress: Progress) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL_S)
            self._announce(
                StageStatusChangedEvent(text=f"hashing the model's files, once: {progress}")
            )

    def build_order(self, *, is_resumed: bool = False) -> ServeModel | None:
        """The request to serve the hashed model; ``None`` without a model.

        ``is_resumed`` marks a request that repeats an earlier run's, without a user's action.
        """
        settings = self._settings
        if self._facts is None:
            return None
        return ServeModel(
            ref=0,
            model=self._facts,
            is_retry=is_resumed,
            min_peers=settings.min_peers,
            dtype=settings.dtype,
            micro_batches=settings.micro_batches,
            quantize=settings.quantize,
            kv_cache_dtype=settings.kv_cache_dtype,
            objective=settings.objective,
            min_stages=settings.min_stages,
        )

    async def request_serving(self, session: CoordinatorSession) -> None:
        """Ask the coordinator to serve the model and, if the launch wants one, for a join token."""
        order, settings = self.build_order(is_resumed=self.is_resumed), self._settings
        if order is None:
            return
        requests: list[ControlMessage] = [order]
        if self._launch.invite:
            requests.append(InviteRequest(ref=0, ttl=_TOKEN_S, uses=self._launch.invite))
        token = ""
        for request in requests:
            while True:
                try:
                    reply = await session.request(request)
                    break
                except Unavailable as error:
                    log.info("%s", error)
                    await asyncio.sleep(_RETRY_S)
                except MolinkError as error:
                    self._announce(ProblemReportedEvent(text=str(error)))
                    return
            token = reply.token if isinstance(reply, InviteReply) else token
        if self._launch.role == "up":
            discovery = settings.discovery and not is_loopback(settings.host)
            self._announce(SwarmOpenedEvent(discovery=discovery, token=token))
