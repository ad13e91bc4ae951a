"""Weights from safetensors files onto a device, quantized on the way if asked for."""
