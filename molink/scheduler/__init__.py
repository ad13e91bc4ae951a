"""The scheduler beside stage 0: admission, batches, KV blocks, ticks. Plain objects, no I/O."""
