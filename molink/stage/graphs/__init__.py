"""CUDA graphs of decode steps: buckets of sizes, capture, replay."""
