"""The worker: the process that owns one device, with its sockets, links and executor."""
