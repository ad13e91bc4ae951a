"""``python -m tools.emulation.drive SPEC RESULT``: one run of an emulated ring, from where it is.

It forms the ring, plays the daemon of its clients, and writes the times of all tokens. On the rig
it runs beside the head, as the clients' connection is not what is measured.
"""

import asyncio
import sys
from pathlib import Path

import msgspec

from molink.bench.planned_requests import PlannedRequest
from molink.bench.sample import Sample
from molink.errors import MolinkError
from molink.wire.sockets.event_loop import EventLoop
from molink.wire.sockets.key_pair import KeyPair
from tools.emulation.load import Answer, load_on, run_load
from tools.emulation.model import Emulation
from tools.emulation.ring import Host, Member, RingSettings, ring_of


class Spec(msgspec.Struct, frozen=True):
    """What to run; it ends with the last answer, or after ``until`` seconds."""

    emulation: Emulation
    settings: RingSettings
    hosts: tuple[Host, ...]
    plan: tuple[PlannedRequest, ...]
    until: float
    seed: int = 0


class Driven(msgspec.Struct, frozen=True):
    """What came of it: samples in the plan's order, and what the stages said of themselves.

    ``late_share`` is by how much each stage's steps took longer than the device would have, all
    together; ``counters`` and ``gauges`` are each stage's own; ``micro_batches`` is the last ``K``.
    """

    samples: tuple[Sample, ...]
    late_share: tuple[float, ...]
    worst_late_s: tuple[float, ...]
    counters: tuple[dict[str, float], ...]
    gauges: tuple[dict[str, float], ...]
    trouble: tuple[str, ...]


def drive(spec: Spec) -> Driven:
    """Run it.

    Raises:
        MolinkError: the ring can't be formed.
    """
    keys = KeyPair.generate()
    with ring_of(spec.emulation, spec.settings, spec.hosts, keys) as members:
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            answers = runner.run(_answers(spec, members[0], keys))
        return _driven(answers, members)


async def _answers(spec: Spec, head: Member, keys: KeyPair) -> list[Answer]:
    vocabulary = spec.emulation.model_profile.vocabulary
    async with load_on(head, keys, vocabulary, spec.seed) as load:
        return await run_load(load, spec.plan, spec.until)


def _driven(answers: list[Answer], members: list[Member]) -> Driven:
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
    """Run what the arguments say; the exit code."""
    spec, result = (Path(argument) for argument in sys.argv[1:3])
    try:
        done = drive(msgspec.json.decode(spec.read_bytes(), type=Spec))
    except MolinkError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    result.write_bytes(msgspec.json.encode(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
