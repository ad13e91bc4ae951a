"""Figures of the sending end of a link."""

from dataclasses import dataclass


@dataclass(slots=True)
class LinkStats:
    """What happened on a link so far."""

    connects: int = 0
    sent_frames: int = 0
    sent_bytes: int = 0
    #: Rows of volumes: as the stage made them, and as they were sent.
    plain_bytes: int = 0
    packed_bytes: int = 0
    resent: int = 0
    stale_acks: int = 0
    #: Bytes on the decode channel and on the bulk channel: not sent yet, and not acknowledged yet.
    queued: tuple[int, int] = (0, 0)
    in_flight: tuple[int, int] = (0, 0)
    #: Seconds there and back, and bytes/s; 0 = unknown.
    rtt: float = 0.0
    min_rtt: float = 0.0
    rate: float = 0.0

    @property
    def queued_bytes(self) -> int:
        """Bytes that have not been sent at all, on both channels."""
        return sum(self.queued)

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes sent, or to be sent again, and not acknowledged, on both channels."""
        return sum(self.in_flight)

    @property
    def counters(self) -> dict[str, float]:
        """What happened so far, as ``/metrics`` names it."""
        return {
            "link_sent_frames_total": float(self.sent_frames),
            "link_sent_bytes_total": float(self.sent_bytes),
            "link_plain_bytes_total": float(self.plain_bytes),
            "link_packed_bytes_total": float(self.packed_bytes),
            "link_resent_frames_total": float(self.resent),
            "link_connects_total": float(self.connects),
        }

    @property
    def gauges(self) -> dict[str, float]:
        """What is the case now, as ``/metrics`` names it."""
        return {
            "link_rtt_seconds": self.rtt,
            "link_latency_seconds": self.min_rtt / 2,
            "link_rate_bytes_per_second": self.rate,
            "link_queued_decode_bytes": float(self.queued[0]),
            "link_queued_bulk_bytes": float(self.queued[1]),
            "link_unacknowledged_decode_bytes": float(self.in_flight[0]),
            "link_unacknowledged_bulk_bytes": float(self.in_flight[1]),
        }
