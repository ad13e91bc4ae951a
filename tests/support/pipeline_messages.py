"""Messages that the coordinator sends to peers while a pipeline forms."""

from molink.swarm.controller.events import (
    ReserveEpochAction,
)
from molink.wire.messages.instructions import (
    Assign,
    Prefetch,
    Route,
    StageAddress,
)
from tests.support.fake_fleet import FakeFleet, Kit


def assign(
    epoch: int, stage: int, stages: int, layers: tuple[int, int], pipeline: str = "p1"
) -> Assign:
    return Assign(
        pipeline=pipeline,
        epoch=epoch,
        stage=stage,
        stages=stages,
        layers=layers,
        model="toy",
        sources=("a",),
        dtype="auto",
        max_model_len=4096,
    )


def prefetch(number: int, layers: tuple[int, int]) -> Prefetch:
    return Prefetch(number=number, layers=layers, model="toy", sources=("a",))


def route(epoch: int, head: StageAddress | None = None, pipeline: str = "p1") -> Route:
    return Route(
        pipeline=pipeline,
        epoch=epoch,
        model="toy",
        is_ready=head is not None,
        scheduler=head,
        max_model_len=1280 if head is not None else 4096,  # 80 blocks of 16 tokens
        sources=("a",),
    )


def address(name: str, port: int = 5468) -> StageAddress:
    return StageAddress(
        peer=name, public_key=name * 40, addresses=(f"10.0.0.{ord(name)}",), port=port
    )


def form_successor(running: FakeFleet) -> list[tuple[str, Assign]]:
    """`d` has its files: a pipeline of four is being formed beside that of three."""
    join_and_prefetch(running)
    running.prefetched("d", 1)
    assert running.reconciler.successor.record.id == "p2"
    assert ReserveEpochAction("p2", 2) in running.decisions
    return [(p, m) for p, m in running.pop_messages() if isinstance(m, Assign)]


def join_and_prefetch(running: FakeFleet) -> list[tuple[str, Prefetch]]:
    """`d` joins and is asked to prefetch."""
    running.join("d")
    running.wait(1.25, *"abcd")
    return [(p, m) for p, m in running.pop_messages() if isinstance(m, Prefetch)]


# --- restarts --------------------------------------------------------------------------------


def restarted(running: FakeFleet, kit: Kit) -> FakeFleet:
    record = running.committed[-1]
    return kit.FakeFleet(
        *"abc", desired=running.reconciler.desired, pipeline=record, last=(1, record.epoch)
    )
