"""What lost packets cost a TCP connection that sends one message at a time, such as decode rows."""

import math

#: Payload of a full segment on Ethernet, and the initial window in segments (RFC 6928).
_SEGMENT_BYTES, _INITIAL_WINDOW = 1448, 10
#: Round trips until a lost segment is sent again (RFC 8985): acknowledgements of later ones reveal
#: it, with a quarter more in case of reordering (section 6.2).
_RACK_ROUND_TRIPS = 1.25
#: The same if no later one follows: a probe does; for a message of one segment it waits for the
#: longest delayed acknowledgement in addition, in seconds (section 7.2).
_PROBE_ROUND_TRIPS, _DELAYED_ACK_S = 2.0, 0.2
#: CUBIC cuts the window by this share and then adds so many segments per round trip (RFC 9438,
#: sections 4.6 and 4.3).
_WINDOW_CUT, _WINDOW_GROWTH = 0.3, 0.53


def expected_loss_s(nbytes: float, round_trip: float, loss: float) -> float:
    """Average delay of a message of ``nbytes`` due to lost packets, in seconds.

    ``round_trip`` in seconds; ``loss`` is the share of packets lost on the way there. A loss delays
    its message until it is sent again. It also leaves a window smaller than a message, so that the
    next ones take a second round trip, until the window has grown again.
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
