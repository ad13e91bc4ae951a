"""Packet shaping without I/O: queues with a rate, delays, losses and cuts.

Times are seconds of one clock. A packet passes the sender's uplink queue, the sender's delay, and
the receiver's downlink queue. Its departure is computed on entry, so a late poll delivers late but
never lowers a rate.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from math import inf
from random import Random
from typing import Any

from tools.wan.node import Node, check_field

_MBIT = 1e6 / 8


class Line:
    """One direction of a node's connection: a drop-tail queue at a rate, then a delay."""

    __slots__ = ("_free", "_rate", "delay", "dropped", "limit", "passed", "waiting")

    def __init__(self, mbps: float, limit: int, delay: float = 0.0) -> None:
        """``limit`` in bytes; ``mbps`` 0 is unlimited; ``delay`` in seconds."""
        self._rate = mbps * _MBIT or inf
        self._free = 0.0
        self.limit = limit
        self.delay = delay
        #: Departure time before the delay, and packet, in order.
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.passed = 0
        self.dropped = 0

    def put(self, packet: bytes, now: float) -> bool:
        """Queue ``packet``; ``False`` if the queue is full."""
        size = len(packet)
        free = self._free
        if free > now:
            if (free - now) * self._rate + size > self.limit:
                self.dropped += 1
                return False
        else:
            free = now
        self._free = free = free + size / self._rate
        self.waiting.append((free, packet))
        return True

    @property
    def next_at(self) -> float:
        """Time of the next delivery."""
        return self.waiting[0][0] + self.delay if self.waiting else inf

    def set_rate(self, mbps: float, now: float) -> None:
        """Change the rate, also for queued packets."""
        rate = mbps * _MBIT or inf
        scale = self._rate / rate if self._rate < inf else 1.0
        self.waiting = deque(
            (at if at <= now else now + (at - now) * scale, packet) for at, packet in self.waiting
        )
        self._free = now + max(0.0, self._free - now) * scale
        self._rate = rate


class _Site:
    __slots__ = ("closed", "cut", "down", "loss", "loss_of", "lost", "up")

    def __init__(self, node: Node, seed: str) -> None:
        self.up = Line(node.up_mbps, node.queue_bytes, node.delay_ms / 1000)
        self.down = Line(node.down_mbps, node.queue_bytes)
        self.loss, self.closed = node.loss, node.closed
        self.loss_of = Random(seed).random
        self.cut = False
        self.lost = 0


class Network:
    """All nodes; ``of`` maps the last byte of an IP address to a node index."""

    def __init__(self, nodes: Sequence[Node], of: dict[int, int], seed: int = 0) -> None:
        self._sites = [_Site(node, f"{seed} {index}") for index, node in enumerate(nodes)]
        self._of = of
        #: Packets that are not IP or have no receiver.
        self.strays = 0

    def put(self, source: int, packet: bytes, now: float) -> None:
        """Accept a packet sent by node ``source``."""
        site = self._sites[source]
        if site.cut:
            site.lost += 1
        else:
            site.up.put(packet, now)

    def due(self, now: float) -> Iterator[tuple[int, float, bytes]]:
        """Yield deliveries up to ``now``: receiver, due time, packet."""
        for site in self._sites:
            waiting, delay = site.up.waiting, site.up.delay
            while waiting and (at := waiting[0][0] + delay) <= now:
                self._cross_site(site, waiting.popleft()[1], at)
        for index, site in enumerate(self._sites):
            waiting = site.down.waiting
            while waiting and waiting[0][0] <= now:
                at, packet = waiting.popleft()
                if site.cut:
                    site.lost += 1
                else:
                    site.down.passed += 1
                    yield index, at, packet

    def _cross_site(self, site: _Site, packet: bytes, at: float) -> None:
        if site.cut or (site.loss and site.loss_of() < site.loss):
            site.lost += 1
            return
        to = self._of.get(_last_byte(packet))
        if to is None:
            self.strays += 1
            return
        if self._sites[to].closed and _is_syn(packet):
            self._sites[to].lost += 1
            return
        site.up.passed += 1
        self._sites[to].down.put(packet, at)

    @property
    def next_at(self) -> float:
        """Time of the next event."""
        soonest = inf
        for site in self._sites:
            soonest = min(soonest, site.up.next_at, site.down.next_at)
        return soonest

    def change(self, index: int, name: str, value: float, now: float) -> None:
        """Change a field of :class:`Node`, or ``cut`` (0 or 1).

        Raises:
            ValueError: unknown field or invalid value.
        """
        site = self._sites[index]
        if name == "cut":
            site.cut = bool(value)
            return
        check_field(name, value)
        match name:
            case "up_mbps":
                site.up.set_rate(value, now)
            case "down_mbps":
                site.down.set_rate(value, now)
            case "delay_ms":
                site.up.delay = value / 1000
            case "queue_bytes":
                site.up.limit = site.down.limit = int(value)
            case "loss":
                site.loss = value
            case "closed":
                site.closed = value

    @property
    def stats(self) -> list[dict[str, Any]]:
        """Packets per node."""
        return [
            {
                "sent": site.up.passed,
                "received": site.down.passed,
                "dropped_up": site.up.dropped,
                "dropped_down": site.down.dropped,
                "lost": site.lost,
            }
            for site in self._sites
        ]


def _last_byte(packet: bytes) -> int:
    """Last byte of a packet's destination; -1 if it is neither IPv4 nor IPv6."""
    end = {4: 19, 6: 39}.get(packet[0] >> 4 if packet else 0, len(packet))
    return packet[end] if end < len(packet) else -1


def _is_syn(packet: bytes) -> bool:
    """Whether an IPv4 packet opens a TCP connection (SYN without ACK)."""
    if packet[0] >> 4 != 4:
        return False
    flags = 4 * (packet[0] & 15) + 13
    return packet[9] == 6 and len(packet) > flags and packet[flags] & 0x12 == 0x02
