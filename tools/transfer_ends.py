"""The processes of :mod:`tools.bench_transfer`, each in a namespace of its own.

    python -m tools.transfer_ends source|fetch|drive

A line of JSON on stdin says what to do; lines of JSON on stdout tell what came of it.
"""

import asyncio
import json
import os
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq.asyncio

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.tensor_layout import stage_tensors
from molink.facts.identity import derive_peer_id
from molink.swarm.membership.address_book import AddressBook
from molink.wire.messages.codec import control_codec
from molink.wire.messages.instructions import PeerInfo, Route
from molink.wire.messages.worker_pipe import PeerKey
from molink.wire.sockets.event_loop import EventLoop
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import Server
from molink.wire.sockets.zap import ZapAuthenticator
from molinkd.peer.artifacts.model_replicator import ModelReplicator
from molinkd.peer.artifacts.model_repository import ModelRepository
from molinkd.peer.artifacts.model_store import ModelStore
from molinkd.peer.artifacts.peer_source import PeerConnector
from molinkd.peer.artifacts.progress import Progress
from molinkd.peer.control_service import ControlService
from tools.emulation.drive import Spec
from tools.emulation.load import load_on, run_load
from tools.emulation.ring import ring_of

LAYERS = 12
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "torch_dtype": "bfloat16",
}


def write_model(folder: Path, config: Mapping[str, object] = _CONFIG) -> None:
    """A model of random bytes, without a tokenizer: 308 MB unless ``config`` says otherwise."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    header: dict[str, object] = {}
    end = 0
    loaded = ModelConfig.load_folder(folder)
    for name, shape in stage_tensors(loaded, 0, loaded.layers).items():
        begin, size = end, 2
        for extent in shape:
            size *= extent
        end = begin + size
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for done in range(0, end, 1 << 24):
            file.write(os.urandom(min(1 << 24, end - done)))


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


async def _line() -> str:
    return await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def source(config: dict[str, Any]) -> None:
    """The PC that has the files, until stdin ends."""
    context, keys = zmq.asyncio.Context(), KeyPair.generate()
    gatekeeper = ZapAuthenticator(context)
    gatekeeper.start()
    gatekeeper.allow_peer(config["fetcher"])
    library = ModelRepository()
    root = library.add_model("m", Path(config["folder"])).manifest.root
    nobody: Any = None
    service = ControlService("me", library, nobody, nobody)
    server: Any = Server(
        context,
        keys,
        control_codec(),
        gatekeeper,
        service.handle_message,
        permits=service.is_permitted,
    )
    service.send = server.send
    _say({"port": server.bind(config["address"], (0, 1)), "key": keys.public, "root": root})
    await _line()
    os._exit(0)


@asynccontextmanager
async def _store(config: dict[str, Any], folder: Path) -> AsyncIterator[tuple[ModelStore, str]]:
    context, keys = zmq.asyncio.Context(), KeyPair.from_secret(config["secret"])
    book = AddressBook(PeerKey(peer=derive_peer_id(keys.public), public_key=keys.public))
    holder = derive_peer_id(config["key"])
    book.add_peer(
        PeerInfo(
            peer=holder,
            name="source",
            public_key=config["key"],
            addresses=(config["address"],),
            control_port=config["port"],
        )
    )
    connect = PeerConnector(context, keys, book).connect_peer
    yield (
        ModelStore(folder, "me", ModelRepository(), connect, ModelRepository(), lambda *_: None),
        holder,
    )


async def _fetch(config: dict[str, Any], folder: Path) -> None:
    """Fetch all of the model, again and again, until it is cancelled."""
    while True:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        await asyncio.to_thread(folder.mkdir)
        async with _store(config, folder) as (store, holder):
            try:
                await _once(config, store, holder)
            finally:
                config["bytes"] += store.bytes_received


async def _once(config: dict[str, Any], store: ModelStore, holder: str) -> None:
    model, root, layers = "m", config["root"], (0, LAYERS)
    if config["kind"] == "copy":
        whole = asyncio.Event()
        copier = ModelReplicator(store, ModelRepository(), lambda: (0, 0), whole.set, wanted=True)
        route = Route(
            pipeline="p1",
            epoch=1,
            model=model,
            root=root,
            sources=(holder,),
            is_ready=True,
            scheduler=None,
            max_model_len=1,
        )
        copier.serve(route)
        try:
            await whole.wait()
        finally:
            await copier.close()
    elif config["kind"] == "prefetch":
        await store.fetch_stage(model, root, layers, [holder], Progress(), rate_limited=True)
    else:
        await store.fetch_stage(model, root, layers, [holder])


async def fetch(config: dict[str, Any]) -> None:
    """Fetch between the name of a kind and ``off``, until an empty line."""
    with tempfile.TemporaryDirectory(prefix="molink-bench-") as base:
        task: asyncio.Task[None] | None = None
        while (line := await _line()).strip():
            if line.strip() != "off":
                config |= {"bytes": 0, "kind": line.strip()}
                task = asyncio.create_task(_fetch(config, Path(base) / "store"))
            elif task is not None:
                task.cancel()
                failed = (await asyncio.gather(task, return_exceptions=True))[0]
                if not isinstance(failed, asyncio.CancelledError):
                    _say({"error": repr(failed)})
                _say({"bytes": config["bytes"]})
    os._exit(0)


async def _answers(spec: Spec, members: Any, keys: KeyPair) -> dict[str, Any]:
    vocabulary = spec.emulation.model_profile.vocabulary
    async with load_on(members[0], keys, vocabulary, spec.seed) as load:
        _say({"ready": True})
        answers = await run_load(load, spec.plan, spec.until)
        return {
            "began": load._began,
            "times": sorted(time for answer in answers for time in answer.times),
            "errors": [answer.error for answer in answers if answer.error],
        }


def drive(config: dict[str, Any]) -> None:
    """A ring that decodes for a while; when its tokens came."""
    spec = msgspec.json.decode(Path(config["spec"]).read_bytes(), type=Spec)
    keys = KeyPair.generate()
    with ring_of(spec.emulation, spec.settings, spec.hosts, keys) as members:
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            told = runner.run(_answers(spec, members, keys))
        _say(told | {"trouble": [reason for one in members for reason in one.trouble]})


def main() -> None:
    """Be what the argument says."""
    config = json.loads(sys.stdin.readline())
    role = sys.argv[1]
    if role == "drive":
        drive(config)
        return
    run = {"source": source, "fetch": fetch}[role]
    threading.stack_size(1 << 20)
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(partial(run, config)())


if __name__ == "__main__":
    main()
