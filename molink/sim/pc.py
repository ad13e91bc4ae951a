"""What the stages on one PC share: its device, and its way out."""

from molink.sim.uplink import Uplink


class SimPc:
    """A PC; several stages may be on it, and several PCs behind one ``uplink``."""

    def __init__(self, uplink: Uplink) -> None:
        self.uplink = uplink
        #: Whether it takes part.
        self.is_present = True
        #: How many times as long as its device says a step takes: one that is hot, or shared.
        self.slowdown = 1.0
        #: Seconds in which it has computed.
        self.busy_s = 0.0
        self._free_at = 0.0

    def reserve_device(self, seconds: float, now: float) -> float:
        """The device is to compute for ``seconds`` if it is cool.

        Returns the seconds until it has: after what other stages have begun.
        """
        seconds *= self.slowdown
        wait = self._free_at - now if self._free_at > now else 0.0
        self.busy_s += seconds
        seconds += wait
        self._free_at = now + seconds
        return seconds
