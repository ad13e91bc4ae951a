"""A worker that speaks the pipe and does nothing else: ``python fake_worker.py [how]``.

``how``: ``good``, ``crash`` (after it has loaded), ``deaf`` (ignores everything, even the end of
its input), ``mute`` (the same, and says nothing), ``garbage``, ``cold`` (never ready as a standby
worker), ``loads`` (without an end).
"""

import sys
import time

import msgspec

from molink.wire.messages.load import StageLoad
from molink.wire.messages.worker_pipe import (
    FormRing,
    LoadStage,
    PeerKeys,
    Ping,
    Pong,
    RingFormed,
    ToWorker,
    WarmedUp,
    WarmUp,
    WeightLoadProgress,
    WorkerLoaded,
    WorkerStats,
    read_pipe,
    write_pipe,
)


def main() -> None:
    how = sys.argv[1] if len(sys.argv) > 1 else "good"
    decoder = msgspec.msgpack.Decoder(ToWorker)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    if how == "garbage":
        sink.write(b"\xff" * 64)
        sink.flush()
    if how == "deaf":
        write_pipe(sink, WorkerLoaded(port=4242, max_blocks=10, weight_bytes=1))
    while how in ("deaf", "mute"):
        time.sleep(3600)
    while (message := read_pipe(source, decoder)) is not None:
        if isinstance(message, WarmUp) and how != "cold":
            write_pipe(sink, WarmedUp())
        elif isinstance(message, LoadStage):
            if how == "loads":
                write_pipe(sink, WeightLoadProgress(done=1, total=4))
                continue
            write_pipe(sink, WorkerLoaded(port=4242, max_blocks=10, weight_bytes=1))
            if how == "crash":
                print("RuntimeError: out of luck", file=sys.stderr, flush=True)
                sys.exit(3)
        elif isinstance(message, PeerKeys):
            count = float(len(message.peers))
            stats = WorkerStats(
                epoch=0,
                counters={"steps": 2.0},
                gauges={"members": count},
                load=StageLoad("p1", 0, busy=34),
            )
            write_pipe(sink, stats)
        elif isinstance(message, FormRing):
            write_pipe(sink, RingFormed(epoch=message.epoch))
        elif isinstance(message, Ping):
            write_pipe(sink, Pong())


if __name__ == "__main__":
    main()
