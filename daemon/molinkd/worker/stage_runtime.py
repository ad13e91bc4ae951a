"""A stage's runtime in one epoch: deciders, connections and executor."""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import zmq.asyncio

from molink.facts.drafts import AUTO_DRAFTS, MAX_LOOKAHEAD
from molink.facts.dtypes import DTYPE_SIZES
from molink.facts.footprint import count_state_slots
from molink.facts.images import ImageInput
from molink.facts.ring_times import LinkFacts
from molink.link.base import OutConnectionEvents
from molink.link.estimate.link_memory import LinkMemory
from molink.link.out_link import LinkStats
from molink.link.packing.compression import RowPacker
from molink.link.packing.compressor import Compressor
from molink.ring.build import LinkEnvironment, RingPlan, StageEnvironment, build_ring
from molink.ring.ring import Ring
from molink.ring.ring_measurements import NO_HOST_MEMORY, HostMemory
from molink.ring.stage import DraftRunner, StageShape
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.policies.answer_lengths import AnswerLengths
from molink.scheduler.scheduler import Scheduler
from molink.wire.messages.codec import DataMessage, data_codec
from molink.wire.messages.data_plane import Channel
from molink.wire.messages.instructions import StageAddress
from molink.wire.messages.load import SchedulerLoad, StageLoad
from molink.wire.messages.serving import Cancel, Credit, PixelFragment, PromptFragment, Submit
from molink.wire.messages.worker_pipe import FormRing, LoadStage
from molink.wire.sockets.client import Client, ClientEvents
from molink.wire.sockets.create_socket import endpoints
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender, Server
from molink.wire.sockets.tcp_info import avoid_bbr, enable_pacing, has_idle_reset
from molinkd.worker.engine import EncodedImages, ImageEncoderLike, StageEngine
from molinkd.worker.request_receiver import ReceiverModel, RequestReceiver
from molinkd.worker.request_table import RequestTable


class StageRuntime:
    """Builds and owns the deciders, connections and executor of one epoch.

    ``on_dead`` is called with the reason when the next stage is declared dead. ``memory`` and
    ``answers`` outlive the epoch; ``host`` is the stage's host memory for KV.
    """

    def __init__(
        self,
        start: LoadStage,
        command: FormRing,
        engine: StageEngine,
        context: zmq.asyncio.Context,
        server: Server[DataMessage],
        on_dead: Callable[[str], None],
        on_broken: Callable[[str], None],
        memory: LinkMemory | None = None,
        host: HostMemory = NO_HOST_MEMORY,
        answers: AnswerLengths | None = None,
    ) -> None:
        self.epoch = command.epoch
        #: Peer of the previous stage; empty in a ring of one.
        self.previous_peer = command.ring[start.stage - 1].peer if len(command.ring) > 1 else ""
        self._start = start
        self._command = command
        self._server = server
        self._engine = engine
        self._weight_bytes = engine.stage.weight_bytes
        self._stage = engine.stage
        self._kv_bytes = engine.stage.pool_bytes(command.blocks, start.block_size)
        self._host_kv_bytes = host.blocks * engine.stage.block_bytes(start.block_size)
        self._link_memory = memory or LinkMemory(None)
        self._record_file: RecordFile | None = None
        self._connector: StageConnector | None = None
        self.receiver: RequestReceiver | None = None
        requests = RequestTable(engine.grammars)
        loop = asyncio.get_running_loop()
        self._executor = engine.create_executor(requests, loop.call_soon_threadsafe)
        link = self._connect_next_stage(context, on_dead) if len(command.ring) > 1 else None
        model: DraftRunner | None = None
        if engine.draft is not None and start.stage == 0:
            model = engine.draft.create_model(self._executor.submit_task, loop.call_soon_threadsafe)
        self._ring_seat = build_ring(
            _make_ring_plan(start, command, engine, self.previous_peer, host),
            StageEnvironment(
                loop,
                requests,
                self._executor,
                self._create_receiver,
                on_broken,
                link,
                model,
                answers or AnswerLengths(),
                engine.history,
            ),
        )

    @property
    def ring(self) -> Ring:
        """Order of this stage's work."""
        return self._ring_seat.ring

    def open(self) -> None:
        """Connect to the next stage and start."""
        self._ring_seat.start()

    async def close(self) -> None:
        """Leave the ring after the running step."""
        self._ring_seat.close()
        if self._connector is not None:
            await self._connector.close()
        if self._record_file is not None:
            self._record_file.close()
        await asyncio.to_thread(self._executor.close)

    def handle_message(
        self, sender: MessageSender, message: DataMessage, payload: memoryview | None
    ) -> None:
        """Handle a message from the worker's socket."""
        incoming = self._ring_seat.incoming
        if incoming is not None and incoming.handle_message(sender, message, payload):
            return
        if self.receiver is not None and isinstance(
            message, Submit | PromptFragment | PixelFragment | Cancel | Credit
        ):
            self.receiver.handle_message(sender, message, payload, time.perf_counter())
            self.ring.run_pending()

    def collect_stats(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return counters and gauges of this epoch, by name."""
        counters, gauges = self._ring_seat.collect_stats()
        gauges |= {
            "stage_weight_bytes": float(self._weight_bytes),
            "stage_kv_bytes": float(self._kv_bytes),
        }
        gauges["stage_host_kv_bytes"] = float(self._host_kv_bytes)
        gauges["stage_host_expert_bytes"] = float(self._stage.host_expert_bytes)
        gauges["stage_resident_expert_share"] = self._stage.resident_share
        return counters, gauges

    def report_load(self) -> StageLoad:
        """Load of this stage and its link, as reported to peers."""
        bubbles, out = self.ring.bubbles, self._ring_seat.outgoing
        link = out.stats if out is not None else LinkStats()
        return StageLoad(
            self._start.pipeline,
            self._start.stage,
            min(100, round(100 * bubbles.busy_share)),
            min(100, round(100 * bubbles.bubble_share)),
            self.ring.num_requests,
            self._weight_bytes,
            self._kv_bytes,
            round(link.min_rtt / 2 * 1e6),
            round(link.rate),
            link.queued,
            link.in_flight,
        )

    def report_scheduler_load(self) -> SchedulerLoad | None:
        """Load of the scheduler, on the first stage."""
        scheduler = self._ring_seat.scheduler
        return (
            None
            if scheduler is None
            else scheduler.report_load(self._start.pipeline, time.perf_counter())
        )

    def _create_receiver(self, scheduler: Scheduler) -> RequestReceiver:
        stage, images = self._engine.stage, self._engine.images
        config = stage.config
        connectors = 1 if config.vision is None else len(config.vision.connectors)
        model = ReceiverModel(
            config.vocab_size,
            connectors * config.hidden_size * DTYPE_SIZES[stage.dtype],
            tuple(adapter.name for adapter in config.adapters),
            None if images is None else config.vision,
            None if images is None else partial(self._encode_images, images),
        )
        self.receiver = RequestReceiver(scheduler, self._start.pipeline, model, self._server.send)
        return self.receiver

    def _encode_images(
        self,
        encoder: ImageEncoderLike,
        images: Sequence[ImageInput],
        is_wanted: Callable[[], bool],
        done: Callable[[EncodedImages, float], None],
    ) -> None:
        """Encode images beside the steps; ``done`` is called on the ring's thread."""

        def on_encoded(result: EncodedImages) -> None:
            done(result, time.perf_counter())
            self.ring.run_pending()

        hand_over = asyncio.get_running_loop().call_soon_threadsafe
        encoder.encode_images(images, is_wanted, hand_over, on_encoded)

    # --- links -----------------------------------------------------------------------------------

    def _connect_next_stage(
        self, context: zmq.asyncio.Context, on_dead: Callable[[str], None]
    ) -> LinkEnvironment:
        start, after = self._start, self._next_stage
        keys = KeyPair(start.public_key, start.secret_key)
        targets = endpoints(after.addresses, after.port)
        self._connector = StageConnector(context, keys, after.public_key, targets)
        if start.settings.record:
            self._record_file = RecordFile(
                Path(start.settings.record), start.pipeline, start.stage, self.epoch
            )
        packs = start.settings.compression != "none"
        return LinkEnvironment(
            self._connector.open_connection,
            self._server,
            on_dead,
            RowPacker(Compressor(start.settings.compression), time.perf_counter) if packs else None,
            self._link_memory.find_facts(after.peer),
            self._store_link_facts,
            None if self._record_file is None else self._record_file.write_line,
            start.settings.keep_warm and has_idle_reset(),
        )

    def _store_link_facts(self, facts: LinkFacts) -> None:
        self._link_memory.remember_link(self._next_stage.peer, facts, time.perf_counter())

    @property
    def _next_stage(self) -> StageAddress:
        return self._command.ring[(self._start.stage + 1) % len(self._command.ring)]


def _make_ring_plan(
    start: LoadStage, command: FormRing, engine: StageEngine, previous_peer: str, host: HostMemory
) -> RingPlan:
    config = engine.stage.config
    shape = StageShape(
        start.stage,
        len(command.ring),
        config.hidden_size,
        config.vocab_size,
        engine.stage.wire_dtype,
    )
    return RingPlan(
        command.epoch,
        start.pipeline,
        shape,
        _make_scheduler_limits(start, command, engine),
        config.max_model_len,
        engine.profile,
        start.settings.link_policy,
        start.settings.cut_through,
        previous_peer,
        scheduling_policy=start.settings.scheduling_policy,
        host_memory=host,
    )


def _make_scheduler_limits(
    start: LoadStage, command: FormRing, engine: StageEngine
) -> SchedulerConfig:
    stage = engine.stage
    config = stage.config
    drafts, max_num_seqs = start.settings.num_speculative_tokens, start.settings.max_num_seqs
    lookahead, state_slots = MAX_LOOKAHEAD if drafts == AUTO_DRAFTS else 0, 0
    keeps_states = config.keeps_states
    if keeps_states:
        # A slot keeps the drafts of one pass, and can't be swapped out by blocks.
        state_slots, lookahead = count_state_slots(command.blocks * start.block_size), 0
        max_num_seqs = min(max_num_seqs, state_slots)
    return SchedulerConfig(
        num_blocks=command.blocks,
        block_size=start.block_size,
        micro_batches=command.micro_batches,
        num_stages=len(command.ring),
        row_bytes=config.hidden_size * DTYPE_SIZES[stage.wire_dtype],
        max_num_batched_tokens=start.settings.max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_queue_len=start.settings.max_queue_len,
        max_queue_s=start.settings.max_queue_time,
        max_model_len=start.max_model_len,
        # Prefixes are shareable only if keys do not depend on the request's length.
        prefix_cache=start.settings.prefix_cache and not config.keys_depend_on_length,
        short_context=config.short_context,
        profiles=command.profiles,
        prefill_only_batches=start.settings.prefill_only_batches,
        num_speculative_tokens=drafts,
        lookahead_volumes=lookahead,
        draft_model=None if engine.draft is None else engine.draft.facts,
        preemption_mode="recompute" if keeps_states else start.settings.preemption_mode,
        state_slots=state_slots,
        whole_images=config.vision is not None and config.vision.whole_images,
    )


class StageConnector:
    """Opens the channels of an ``OutLink`` to the worker with ``server_key``.

    ``addresses`` are ``tcp://host:port``, tried in turn.
    """

    def __init__(
        self, context: zmq.asyncio.Context, keys: KeyPair, server_key: str, addresses: Sequence[str]
    ) -> None:
        self._context = context
        self._keys = keys
        self._server_key = server_key
        self._addresses = addresses
        self.clients: list[Client[DataMessage]] = []

    def open_connection(self, channel: Channel, events: OutConnectionEvents) -> Client[DataMessage]:
        """Open the connection of a channel."""
        client = Client(
            self._context,
            self._keys,
            data_codec(),
            self._server_key,
            self._addresses,
            name=f"the next stage ({channel.name.lower()} channel)",
            events=ClientEvents(
                on_message=events.on_message,
                on_connect=events.on_connect,
                on_disconnect=events.on_disconnect,
                on_lost=events.on_lost,
                on_drained=events.on_drained,
                on_open=avoid_bbr if channel is Channel.DECODE else enable_pacing,
            ),
        )
        self.clients.append(client)
        return client

    async def close(self) -> None:
        """Close all connections."""
        for client in self.clients:
            await client.close()


log = logging.getLogger(__name__)

#: Bytes buffered before a write.
_BUFFER_BYTES = 16 * 1024


class RecordFile:
    """Records a link's decisions, one JSON object a line; a failed write only logs a warning."""

    def __init__(self, folder: Path, pipeline: str, stage: int, epoch: int) -> None:
        """An existing file of that name is overwritten."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", pipeline)[:100]
        self.path = folder / f"link-{name}-{stage}-{epoch}.jsonl"
        self._buffer = bytearray()
        self._file: BinaryIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            log.warning("can't record to %s: %s", self.path, error)

    def write_line(self, line: bytes) -> None:
        """Append a line; the file always ends with a complete one."""
        if self._file is not None:
            self._buffer += line
            if len(self._buffer) >= _BUFFER_BYTES:
                self._flush_buffer()

    def close(self) -> None:
        """Flush and close the file."""
        self._flush_buffer()
        if self._file is not None:
            self._close_file(self._file)

    def _flush_buffer(self) -> None:
        if self._file is None or not self._buffer:
            return
        end = self._file.tell()
        try:
            if self._file.write(self._buffer) != len(self._buffer):
                raise OSError("write stopped short")
        except OSError as error:
            log.warning("can't record to %s any more: %s", self.path, error)
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            self._close_file(self._file)
        self._buffer.clear()

    def _close_file(self, file: BinaryIO) -> None:
        self._file = None
        # Closing may report an earlier write's failure.
        with contextlib.suppress(OSError):
            file.close()
