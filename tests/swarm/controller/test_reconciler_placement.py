import msgspec
import pytest

from molink.facts.device import Device
from molink.facts.model import BlockWeights
from molink.swarm.controller.events import (
    MemberRemovedEvent,
)
from molink.swarm.controller.planner import (
    candidate_from_report,
    candidates_differ,
)
from molink.wire.messages.instructions import (
    Notice,
)
from tests.support import fake_fleet
from tests.support.fake_fleet import FACTS, GB, FakeFleet, Kit
from tests.support.pipeline_messages import route


def test_lack_of_memory_is_explained(kit: Kit) -> None:
    fake = kit.FakeFleet("a", "b")
    fake.serve()
    fake.report("a", memory=4 * kit.GB)
    fake.wait(2, "a")
    assert fake.reconciler.reason.startswith("toy needs 6.0 GB, the swarm offers 3.8 GB on 1 peer")
    assert fake.pop_messages() == [("a", route(0))]
    fake.report("b", memory=4 * kit.GB)
    fake.wait(1.25, *"ab")
    assert fake.reconciler.formation is not None


def test_failing_packed_products_are_not_planned_again(kit: Kit) -> None:
    """The model fits only packed; at first the card's check of the usual formats has passed."""
    fake = kit.FakeFleet("a", "b")
    packed = BlockWeights(layer=(kit.GB // 4, 0), first=(0, 0), last=(0, 0))
    facts = msgspec.structs.replace(FACTS, plane_weights=packed)

    def report(*, has_passed: bool) -> None:
        card = Device(kind="cuda", name="RTX", memory=4 * kit.GB, has_block_kernels=has_passed)
        fake.report("a", device=card)

    fake.serve(facts=facts, min_peers=1)
    report(has_passed=True)
    fake.wait(2, "a")
    assert fake.reconciler.formation.peers == ("a",)
    fake.pop_messages()
    # The daemon reports the change first.
    report(has_passed=False)
    fake.failed("a", 0, 1)
    fake.wait(2, "a")
    assert fake.reconciler.formation is None
    assert fake.reconciler.reason.startswith("toy needs 6.0 GB, the swarm offers 3.8 GB on 1 peer")
    fake.report("b", memory=8 * kit.GB)
    fake.wait(2, *"ab")
    assert {"b"} <= set(fake.reconciler.formation.peers)


@pytest.mark.parametrize("fact", ["has_block_kernels", "reads_pages"])
def test_layers_are_placed_again_when_kernels_fail(fact: str) -> None:
    passed, failed = (
        candidate_from_report(
            "a",
            fake_fleet.report(
                "a", device=Device(kind="cuda", name="RTX", memory=GB, **{fact: proven})
            ),
        )
        for proven in (True, False)
    )
    assert candidates_differ((failed,), (passed,))
    assert not candidates_differ((failed,), (failed,))


def test_notice_for_nonexistent_layers(running: FakeFleet) -> None:
    running.join("d", stage="1-99")
    running.wait(2, *"abcd")
    why = "names layers that toy doesn't have: it has 6"
    notices = [told for told in running.pop_messages() if isinstance(told[1], Notice)]
    assert notices == [("d", Notice(text=f"--stage 1-99 {why}"))]
    assert running.reconciler.explain_exclusion("d") == f"excluded: --stage 1-99 {why}"
    running.handle_event(MemberRemovedEvent("c", "left"))
    running.wait(2, *"abd")
    running.obey()
    assert running.reconciler.is_ready, "it delays no other peer"
    running.report("d", stage="auto")
    assert ("d", Notice(text="")) in running.pop_messages()


def test_nonexistent_layers_are_the_reason(kit: Kit) -> None:
    fake = kit.FakeFleet("d")
    fake.serve()
    fake.report("d", stage="1-99")
    fake.wait(2, "d")
    assert "D (--stage 1-99) names layers that toy doesn't have" in fake.reconciler.reason


def test_impossible_placement_keeps_serving(running: FakeFleet) -> None:
    running.join("d", stage="1-2")
    running.join("e", stage="2-3")
    running.wait(2, *"abcde")
    assert running.reconciler.is_ready
    assert "overlap" in running.reconciler.reason
    running.handle_event(MemberRemovedEvent("d", "left"))
    running.handle_event(MemberRemovedEvent("e", "left"))
    running.wait(2, *"abc")
    assert running.reconciler.reason == ""
    assert running.reconciler.formation.record.epoch == 1
