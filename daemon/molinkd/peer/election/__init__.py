"""The coordinator process on this PC, and leader election."""
