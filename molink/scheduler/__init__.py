"""The scheduler beside stage 0: admission, batching, KV blocks. Plain objects without I/O."""
