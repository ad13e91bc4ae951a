"""One stage of the ring, without I/O: ordering, execution, forwarding, measurements."""
