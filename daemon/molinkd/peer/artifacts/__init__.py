"""Model files: stores, sources, transfers and replication."""
