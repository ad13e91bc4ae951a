"""Packing of rows before transmission, lossless or in 8 bits, where it pays."""
