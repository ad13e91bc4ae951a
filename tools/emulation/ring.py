"""A ring of emulated stage processes, formed as daemons do it."""

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar, cast

import msgspec

from molink.errors import UsageError, WorkerError
from molink.facts.dtypes import Compression
from molink.facts.identity import derive_peer_id
from molink.facts.settings import PipelineSettings
from molink.wire.messages.base import Message
from molink.wire.messages.instructions import StageAddress
from molink.wire.messages.worker_pipe import (
    FormRing,
    FromWorker,
    LoadStage,
    NextStageLost,
    PeerKey,
    PeerKeys,
    RingFormed,
    WorkerFailed,
    WorkerLoaded,
    WorkerStats,
    read_pipe,
    write_pipe,
)
from molink.wire.sockets.key_pair import KeyPair
from tools.emulation.model import CONTEXT, EmulatedStage, Emulation
from tools.emulation.worker import NOTE
from tools.wan.proxy import Shaper

PIPELINE = "p1"
EPOCH = 1
START_S = 120.0
BLOCK_SIZE = 16
_PORTS = (20000, 30000)

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Host:
    """A stage's address and the command prefix that runs there."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RingSettings:
    """Switches of a ring; ``micro_batches`` 0 lets the scheduler choose."""

    policy: str = "fifo"
    cut_through: bool = False
    compression: Compression = "none"
    micro_batches: int = 0
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    prefill_only: bool = True


@dataclass(slots=True)
class Member:
    """One stage's process; a thread reads its pipe."""

    process: "subprocess.Popen[bytes]"
    keys: KeyPair
    host: Host
    log: Path
    port: int = 0
    #: Its KV blocks.
    blocks: int = 0
    #: Its latest report.
    stats: WorkerStats | None = None
    #: Why it or its neighbour failed.
    trouble: list[str] = field(default_factory=list)
    _said: "queue.SimpleQueue[Any]" = field(default_factory=queue.SimpleQueue)

    def listen(self) -> None:
        """Start reading its messages."""
        threading.Thread(target=self._read, daemon=True).start()

    def send_message(self, message: Message) -> None:
        """Send a message."""
        write_pipe(cast(BinaryIO, self.process.stdin), message)

    def wait_for_message(self, kind: type[M]) -> M:
        """Wait for the next message of that kind, or raise :class:`WorkerError`."""
        end = time.monotonic() + START_S
        while True:
            try:
                message = self._said.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise WorkerError(f"a stage sent nothing for {START_S:.0f} s") from None
            if message is None:
                why = "; ".join(self.trouble) or self.log.read_text(errors="replace")[-500:]
                raise WorkerError(f"a stage has ended: {why}")
            if isinstance(message, kind):
                return message

    def address(self) -> StageAddress:
        """Its address for the others."""
        key = self.keys.public
        return StageAddress(
            peer=derive_peer_id(key), public_key=key, addresses=(self.host.address,), port=self.port
        )

    def punctuality(self) -> Mapping[str, float]:
        """Its latest punctuality from the log."""
        text = self.log.read_text(errors="replace")
        notes = [line for line in text.splitlines() if line.startswith(NOTE)]
        return json.loads(notes[-1].removeprefix(NOTE)) if notes else {}

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def _read(self) -> None:
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromWorker)
        with contextlib.suppress(OSError, ValueError):
            while (message := read_pipe(cast(BinaryIO, self.process.stdout), decoder)) is not None:
                match message:
                    case WorkerStats():
                        self.stats = message
                    case WorkerFailed():
                        self.trouble.append(f"{message.kind}: {message.message}")
                    case NextStageLost():
                        self.trouble.append(message.reason)
                    case _:
                        self._said.put(message)
        self._said.put(None)


@contextlib.contextmanager
def ring_of(
    emulation: Emulation,
    settings: RingSettings,
    hosts: Sequence[Host],
    client: KeyPair,
    delay_ms: float = 0.0,
) -> Iterator[list[Member]]:
    """Run a ring of one stage per host; ``client`` may connect to its scheduler.

    ``delay_ms`` delays links on this PC's loopback (:class:`Shaper`).
    """
    if len(hosts) != emulation.stages:
        raise UsageError(f"{emulation.stages} stages need as many hosts, not {len(hosts)}")
    members: list[Member] = []
    with (
        tempfile.TemporaryDirectory(prefix="molink-emulation-") as folder,
        contextlib.ExitStack() as shapers,
    ):
        described = Path(folder) / "emulation.json"
        described.write_bytes(msgspec.json.encode(emulation))
        try:
            for index, host in enumerate(hosts):
                members.append(_launch_stage(described, index, host))
                members[-1].listen()
                members[-1].send_message(_start(emulation, settings, index, members[-1]))
            _load_stages(members, client)
            for member in members if delay_ms else ():
                shaper = Shaper(member.host.address, member.port, mbps=0.0, delay_ms=delay_ms)
                member.port = shapers.enter_context(shaper).port
            _form_ring(emulation, settings, members)
            yield members
        finally:
            for member in members:
                member.end()


def _launch_stage(described: Path, index: int, host: Host) -> Member:
    log = described.with_name(f"stage-{index}.log")
    command = [*host.prefix, sys.executable, "-m", "tools.emulation.worker", str(described)]
    with log.open("wb") as output:
        process = _spawn_process(command, output)
    return Member(process, KeyPair.generate(), host, log)


def _spawn_process(command: Sequence[str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
    )


def _start(emulation: Emulation, settings: RingSettings, index: int, member: Member) -> LoadStage:
    return LoadStage(
        pipeline=PIPELINE,
        stage=index,
        stages=emulation.stages,
        layers=(index, index + 1),
        model_dir="",
        dtype="bf16",
        device="cpu",
        threads=1,
        public_key=member.keys.public,
        secret_key=member.keys.secret,
        bind=member.host.address,
        ports=_PORTS,
        kv_bytes=EmulatedStage(emulation, index).kv_tokens,
        block_size=BLOCK_SIZE,
        max_model_len=CONTEXT,
        settings=PipelineSettings(
            link_policy=settings.policy,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            cut_through=settings.cut_through,
            prefill_only_batches=settings.prefill_only,
            num_speculative_tokens=0,
            compression=settings.compression,
            max_num_seqs=settings.max_num_seqs,
            max_queue_len=4096,
            prefix_cache=False,
        ),
    )


def _load_stages(members: Sequence[Member], client: KeyPair) -> None:
    keys = [client, *(member.keys for member in members)]
    allowed = PeerKeys(
        peers=tuple(PeerKey(peer=derive_peer_id(key.public), public_key=key.public) for key in keys)
    )
    for member in members:
        member.send_message(allowed)
        loaded = member.wait_for_message(WorkerLoaded)
        member.port, member.blocks = loaded.port, loaded.max_blocks


def _form_ring(emulation: Emulation, settings: RingSettings, members: Sequence[Member]) -> None:
    order = FormRing(
        epoch=EPOCH,
        ring=tuple(member.address() for member in members),
        blocks=min(member.blocks for member in members),
        micro_batches=settings.micro_batches,
        profiles=emulation.profiles,
    )
    for member in members:
        member.send_message(order)
    for member in members:
        member.wait_for_message(RingFormed)
