"""Model files: repository, store, sources, transfers and replication."""
