"""The coordinator: the control plane as a process of its own, with its state in SQLite."""
