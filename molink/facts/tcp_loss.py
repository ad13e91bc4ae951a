"""Delay by lost packets on a TCP connection that sends single messages, such as decode rows."""

import math

#: Payload bytes of a full segment on Ethernet, and the initial window in segments (RFC 6928).
_SEGMENT_BYTES, _INITIAL_WINDOW = 1448, 10
#: Round trips until a lost segment is retransmitted (RFC 8985): acknowledgements of later segments
#: reveal the loss, and a quarter round trip more allows for reordering (section 6.2).
_RACK_ROUND_TRIPS = 1.25
#: Round trips until a probe reveals a loss if no later segment follows. If the message has only one
#: segment, the probe waits in addition for the longest delayed acknowledgement, in seconds (section
#: 7.2).
_PROBE_ROUND_TRIPS, _DELAYED_ACK_S = 2.0, 0.2
#: Share by which CUBIC cuts the window after a loss, and the segments per round trip that it then
#: adds (RFC 9438, sections 4.6 and 4.3).
_WINDOW_CUT, _WINDOW_GROWTH = 0.3, 0.53


def expected_loss_s(nbytes: float, round_trip: float, loss: float) -> float:
    """Return the average delay of a message of ``nbytes`` by lost packets, in seconds.

    ``round_trip`` is in seconds; ``loss`` is the share of packets lost towards the receiver. A loss
    delays its message until the retransmission. It also leaves the window smaller than a message,
    so that the next messages take a second round trip until the window has grown again.
    """
    if not loss:
        return 0.0
    segments = max(1, math.ceil(nbytes / _SEGMENT_BYTES))
    probe = _PROBE_ROUND_TRIPS * round_trip + (_DELAYED_ACK_S if segments == 1 else 0.0)
    earlier = 1.0 - (1.0 - loss) ** (segments - 1)
    again = loss * probe + (1.0 - loss) * earlier * _RACK_ROUND_TRIPS * round_trip
    lacking = _WINDOW_CUT * min(segments, _INITIAL_WINDOW) if segments > 1 else 0.0
    small = lacking / (2 * _WINDOW_GROWTH) * round_trip
    return again + (1.0 - (1.0 - loss) ** segments) * small
