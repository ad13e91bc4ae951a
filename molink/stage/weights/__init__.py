"""Loads weights from safetensors onto a device, with optional quantization."""
