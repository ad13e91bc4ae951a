"""Measured times of a device and a stage: probes, profiles and the benchmark."""
