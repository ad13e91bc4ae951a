"""A wide-area network on one PC: namespaces joined by a relay, and a proxy without root.

:class:`Rig` (Linux, root) gives each node a network namespace whose TUN device ends in one relay
process with a rate, queue, delay and loss per node: real TCP end to end. :class:`VethPair` is a
plain fast link between two namespaces. :class:`Shaper` is a byte-level TCP proxy for any platform;
it hides loss and TCP's windows, so its figures mean less.
"""

from tools.wan.namespaces import RigError, unavailable
from tools.wan.node import Node
from tools.wan.proxy import Shaper
from tools.wan.rig import Rig
from tools.wan.veth import VethPair

__all__ = ["Node", "Rig", "RigError", "Shaper", "VethPair", "unavailable"]
