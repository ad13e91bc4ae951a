"""Rows in fewer bytes, lossless or not, where that pays; frames filled with them."""
