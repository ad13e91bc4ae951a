"""An evening on the WAN rig: swarms of real daemons, each on a rig of its own, side by side.

All have the same PCs, story and requests; they differ in settings. Compute is emulated
(:mod:`tools.evening.worker`) and takes nearly nothing of the PC's cores, so that swarms can run at
the same time, and what else the PC does is equally unfair to all. Files are on every PC's disk
before it begins.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from molink.facts.device import Device
from molink.facts.settings import PipelineSettings
from molinkd.peer.launch import Launch
from molinkd.peer.settings import Settings
from tools.emulation.activations import BUNDLED, make_recording
from tools.evening.pc import Pc
from tools.evening.requests import Answered, Order
from tools.evening.story import DELAY_MS, MBPS, PEERS, Event, Leave, LinkChange, PaceChange
from tools.evening.worker import Computer
from tools.make_bench_model import write_tokenizer
from tools.serving.process import START_S, wait_for
from tools.transfer_ends import write_model
from tools.wan import Node, Rig, RigError
from tools.wan.namespaces import ip

ROOT = Path(__file__).resolve().parents[2]
#: The model as far as its files go: as many layers, and rows as wide, as the emulated one has, but
#: few bytes.
LAYERS, HIDDEN, VOCABULARY = 32, 4096, 512
CONFIG: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 256,
    "eos_token_id": 258,
}
#: What is emulated, and on what: 1.3 ms for each layer and step.
MODEL, DEVICE = "qwen-7b", "rtx3060"
#: How many times as long the steps of each PC take; the last one is an old card.
PACES = (1.0, 1.0, 1.0, 2.0)
#: Bytes/s at which a cool PC reads the model's files' layers, in as long as the emulated ones take.
READ_RATE = 1.95e9
#: Of each PC, in bytes: room for 11 to 13 layers, so three PCs hold the model.
MEMORY = 88_000_000
_TOKEN = re.compile(r'"token":"(molink-[^"]+)"')
_ENDPOINT = re.compile(r"http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True, slots=True)
class Configuration:
    """How a swarm is set up: ``stages`` by PC, ``micro_batches`` and ``max_num_batched_tokens`` (0:
    auto)."""

    name: str
    stages: tuple[str, ...] = ("auto",) * PEERS
    micro_batches: int = 0
    max_num_batched_tokens: int = 0
    #: Whether what placements wait for is scaled as the story is.
    in_step: bool = False


@dataclass(frozen=True, slots=True)
class Files:
    """What is the same for all swarms, and may be kept from one run to the next."""

    folder: Path

    def make(self) -> None:
        """Make what isn't there, but for the copy: that is the first swarm's."""
        if not self.model.is_dir():
            write_model(self.model, CONFIG)
            write_tokenizer(self.model, VOCABULARY)
        if not self.rows.is_file():
            make_recording(BUNDLED, self.rows, hidden=HIDDEN)

    @property
    def model(self) -> Path:
        """The folder that the first PC brings."""
        return self.folder / "model"

    @property
    def copy(self) -> Path:
        """The same as other PCs have it."""
        return self.folder / "copy"

    @property
    def rows(self) -> Path:
        """Recorded activations."""
        return self.folder / "rows.bin"


@dataclass(slots=True)
class Swarm:
    """The PCs of one configuration, on their rig."""

    configuration: Configuration
    folder: Path
    files: Files
    rig: Rig
    #: How many times as long as for users a placement waits.
    waits: float = 1.0
    token: str = ""
    url: str = ""
    _running: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def form(self) -> None:
        """Start all PCs, and wait until each has a place and all files.

        Raises:
            RuntimeError: it takes too long, or a daemon has ended.
        """
        for index in range(PEERS):
            self.start(index)
            if index == 0:
                log, process = self._log(0), self._running[0]
                self.token = wait_for(log, _TOKEN, process)
                self.url = f"http://127.0.0.1:{wait_for(log, _ENDPOINT, process)}"
        deadline = time.monotonic() + START_S
        while not self._formed():
            if time.monotonic() > deadline or any(
                p.poll() is not None for p in self._running.values()
            ):
                raise RuntimeError(f"{self.configuration.name} was not formed: see {self.folder}")
            time.sleep(1.0)

    def start(self, index: int) -> None:
        """Switch a PC on; one that was a member returns."""
        home = self.folder / f"pc{index}"
        home.mkdir(exist_ok=True)
        computer = self.computer(index)
        if not Path(computer.pace).exists():
            computer.set_pace(PACES[index])
        if index and self.files.copy.is_dir() and not (home / "models").exists():
            shutil.copytree(self.files.copy, home / "models")
        (home / "computer.json").write_bytes(msgspec.json.encode(computer))
        new = not (home / "swarm.json").exists()
        launch = Launch(
            home=str(home),
            settings=self._settings(index),
            role="up" if index == 0 else "join",
            model=str(self.files.model) if index == 0 else None,
            token=self.token if index and new else None,
        )
        device = Device(
            kind="cpu",
            name=f"{DEVICE}, emulated",
            memory=MEMORY,
            read_rate=READ_RATE / PACES[index],
        )
        pc = Pc(
            launch=launch,
            device=device,
            computer=str(home / "computer.json"),
            waits=self.waits,
        )
        (home / "pc.json").write_bytes(msgspec.json.encode(pc))
        with self._log(index).open("ab") as output:
            self._running[index] = self.rig.run(
                index,
                [sys.executable, "-m", "tools.evening.pc", str(home / "pc.json")],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "MOLINK_HOME": str(home)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _settings(self, index: int) -> Settings:
        chosen = self.configuration
        return Settings(
            name=f"pc{index}",
            host=self.rig.address(index),
            discovery=False,
            keep_awake=False,
            device="cpu",
            dtype="bf16",
            stage=chosen.stages[index],
            min_peers=PEERS,
            min_stages=1,
            token_uses=255,
            micro_batches=chosen.micro_batches,
            pipeline=PipelineSettings(max_num_batched_tokens=chosen.chunk_tokens),
        )

    def computer(self, index: int) -> Computer:
        """What a PC computes with."""
        pace = self.folder / f"pc{index}.pace"
        return Computer(
            device=DEVICE, model=MODEL, activations=str(self.files.rows), pace=str(pace)
        )

    def _log(self, index: int) -> Path:
        return self.folder / f"pc{index}.log"

    def _formed(self) -> bool:
        command = [sys.executable, "-m", "molinkd", "status", "--json", "--home"]
        asked = self.rig.run(
            0,
            [*command, str(self.folder / "pc0")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        told = asked.communicate()[0]
        if asked.returncode != 0:
            return False
        status = json.loads(told)
        here = [peer for peer in status["peers"] if peer["state"] == "here"]
        whole = all(peer["copied"] == 100 for peer in here[1:])
        return len(here) == PEERS and whole and any(one["ready"] for one in status["pipelines"])

    # --- the story -------------------------------------------------------------------------------

    def happen(self, event: Event) -> None:
        """Have something happen."""
        if isinstance(event, LinkChange):
            self.rig.change(event.peer, up_mbps=event.mbps)
        elif isinstance(event, PaceChange):
            self.computer(event.peer).set_pace(PACES[event.peer] * event.factor)
        elif isinstance(event, Leave):
            self.cut_power(event.peer)
        else:
            self.rig.mend(event.peer)
            self.start(event.peer)

    def cut_power(self, index: int) -> None:
        """All that runs there is gone at once, and nobody hears of it."""
        self.rig.cut(index)
        for pid in ip("netns", "pids", self.rig.namespace(index)).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self._running.pop(index).wait()

    def begin(self, order: Mapping[str, Any]) -> "subprocess.Popen[bytes]":
        """Have its requests sent."""
        asking = self.rig.run(
            0,
            [sys.executable, "-m", "tools.evening.requests"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert asking.stdin is not None
        full = Order(home=str(self.folder / "pc0"), url=self.url, **order)
        asking.stdin.write(msgspec.json.encode(full) + b"\n")
        asking.stdin.close()
        return asking


@contextlib.contextmanager
def swarms(
    configurations: Sequence[Configuration], folder: Path, files: Files, scale: float
) -> Iterator[list[Swarm]]:
    """All of them, formed, with links that have what they have when a story of that scale begins.

    Raises:
        RigError: there is no rig here.
        RuntimeError: a swarm was not formed.
    """
    with contextlib.ExitStack() as stack:
        found = []
        for number, chosen in enumerate(configurations):
            home = folder / f"swarm{number}"
            home.mkdir()
            nodes = [Node(f"pc{index}", 0.0, 0.0, DELAY_MS) for index in range(PEERS)]
            rig = stack.enter_context(Rig(nodes))
            waits = scale if chosen.in_step else 1.0
            found.append(Swarm(chosen, home, files, rig, waits))
            found[-1].form()
            if not files.copy.is_dir():
                shutil.copytree(home / "pc1" / "models", files.copy)
        for swarm in found:
            for index in range(PEERS):
                swarm.rig.change(index, up_mbps=MBPS)
        yield found


def play(
    found: Sequence[Swarm], events: Sequence[Event], order: Mapping[str, Any]
) -> list[Answered]:
    """The evening: what happens to all of them, and what became of the requests of each.

    Raises:
        RigError: somebody who asks has failed.
    """
    asking = [swarm.begin(order) for swarm in found]
    for event in events:
        time.sleep(max(0.0, order["begin"] + event.at - time.perf_counter()))
        for swarm in found:
            swarm.happen(event)
    answered = []
    for process in asking:
        assert process.stdout is not None
        told = process.stdout.read()
        if process.wait() != 0:
            raise RigError("who asks has failed; see above")
        answered.append(msgspec.json.decode(told, type=Answered))
    return answered
