"""The worker process: owns one device, with its sockets, links and executor."""
