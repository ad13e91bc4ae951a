"""The coordinator process on this PC, and who leads."""
