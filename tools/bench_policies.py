"""Time of a transmission policy's decision with many volumes queued, in microseconds.

Half of the volumes are decode rows, half prefill rows. A round is what a sender does: a volume is
produced, the policy decides, the message is sent and acknowledged; as many volumes stay queued.
"""

import argparse
import json
import statistics
import time

from molink.link.policies.base import (
    ChannelPolicy,
    DecodeFinishedEvent,
    DecodeStartedEvent,
    LinkEstimatedEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
    RowsProducedEvent,
    SendRowsAction,
)
from molink.link.policies.create import POLICIES, create_policy
from molink.wire.messages.data_plane import Channel

BOTH = (Channel.DECODE, Channel.BULK)
ROW = 8192
RATE = 12.5e6
ROUNDS = 5000


def main() -> None:
    """Print a line, or with ``--json`` an object, for each policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--volumes", type=int, default=1000, help="volumes that stay queued")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    results = [measure(name, arguments.volumes) for name in POLICIES]
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for result in results:
        print(
            "{policy:22} decide {decide_us:6.2f} µs   with events {round_us:6.2f} µs".format(
                **result
            )
        )


def measure(name: str, volumes: int) -> dict[str, object]:
    """Medians over many decisions, with ``volumes`` queued."""
    policy = create_policy(name)
    policy.handle(LinkEstimatedEvent(0.06, 0.06, RATE), 0.0)
    for volume in range(volumes):
        policy.handle(produced(volume), 0.0)
    decides, rounds, sends = [], [], 0
    for index in range(ROUNDS):
        now = index * 0.01
        begun = time.perf_counter()
        events(policy, volumes + index, now)
        asked = time.perf_counter()
        decision = policy.choose_action(now, BOTH)
        decided = time.perf_counter()
        if isinstance(decision, SendRowsAction):
            sends += 1
            policy.handle(MessageSentEvent(Channel.BULK, ROW), now)
            policy.handle(MessageAcknowledgedEvent(Channel.BULK, ROW, 0.06), now)
        rounds.append(time.perf_counter() - begun)
        decides.append(decided - asked)
    return {
        "policy": name,
        "volumes": volumes,
        "sends": sends,
        "decide_us": 1e6 * statistics.median(decides),
        "decide_p99_us": 1e6 * statistics.quantiles(decides, n=100)[98],
        "round_us": 1e6 * statistics.median(rounds),
    }


def produced(volume: int) -> RowsProducedEvent:
    """Decode and prefill volumes by turns."""
    if volume % 2:
        return RowsProducedEvent(volume, Channel.DECODE, 8, ROW)
    return RowsProducedEvent(volume, Channel.BULK, 512, ROW)


def events(policy: ChannelPolicy, volume: int, now: float) -> None:
    """What happens before a decision: a decode step, and a volume of it."""
    policy.handle(DecodeStartedEvent(8, 0.02), now - 0.02)
    policy.handle(DecodeFinishedEvent(8, 0.1), now)
    policy.handle(produced(volume), now)


if __name__ == "__main__":
    main()
