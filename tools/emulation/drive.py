"""``python -m tools.emulation.drive SPEC RESULT``: one run of an emulated ring.

It forms the ring, acts as the clients' daemon and writes all token times. On the rig it runs beside
the scheduler.
"""

import asyncio
import sys
from pathlib import Path

import msgspec

from molink.bench.report import Sample
from molink.bench.workload import PlannedRequest
from molink.errors import MolinkError
from molink.wire.sockets.event_loop import EventLoop
from molink.wire.sockets.key_pair import KeyPair
from tools.emulation.load import Answer, load_on, run_load
from tools.emulation.model import Emulation
from tools.emulation.ring import Host, Member, RingSettings, ring_of


class Spec(msgspec.Struct, frozen=True):
    """What to run, until the last answer or for ``until`` seconds."""

    emulation: Emulation
    settings: RingSettings
    hosts: tuple[Host, ...]
    plan: tuple[PlannedRequest, ...]
    until: float
    seed: int = 0


class Driven(msgspec.Struct, frozen=True):
    """Samples in the plan's order, and each stage's reports.

    ``late_share`` is how much longer each stage's steps took than planned, in total.
    """

    samples: tuple[Sample, ...]
    late_share: tuple[float, ...]
    worst_late_s: tuple[float, ...]
    counters: tuple[dict[str, float], ...]
    gauges: tuple[dict[str, float], ...]
    trouble: tuple[str, ...]


def drive_load(spec: Spec) -> Driven:
    """Run a spec, or raise :class:`MolinkError`."""
    keys = KeyPair.generate()
    with ring_of(spec.emulation, spec.settings, spec.hosts, keys) as members:
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            answers = runner.run(_collect_answers(spec, members[0], keys))
        return _make_driven(answers, members)


async def _collect_answers(spec: Spec, first: Member, keys: KeyPair) -> list[Answer]:
    vocabulary = spec.emulation.model_profile.vocabulary
    async with load_on(first, keys, vocabulary, spec.seed) as load:
        return await run_load(load, spec.plan, spec.until)


def _make_driven(answers: list[Answer], members: list[Member]) -> Driven:
    notes = [member.punctuality() for member in members]
    stats = [member.stats for member in members]
    return Driven(
        tuple(answer.sample() for answer in answers),
        tuple(
            note["took_s"] / note["planned_s"] - 1 if note.get("planned_s") else 0.0
            for note in notes
        ),
        tuple(note.get("worst_late_s", 0.0) for note in notes),
        tuple({} if each is None else each.counters for each in stats),
        tuple({} if each is None else each.gauges for each in stats),
        tuple(reason for member in members for reason in member.trouble),
    )


def main() -> int:
    """Entry point; returns the exit code."""
    spec, result = (Path(argument) for argument in sys.argv[1:3])
    try:
        done = drive_load(msgspec.json.decode(spec.read_bytes(), type=Spec))
    except MolinkError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    result.write_bytes(msgspec.json.encode(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
