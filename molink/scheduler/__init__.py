"""The scheduler in stage 0's worker: admission, batching, KV blocks. Plain objects without I/O."""
