"""Packs rows before transmission, without loss or in 8 bits, if it pays off."""
