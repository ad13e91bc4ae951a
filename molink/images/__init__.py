"""Decodes clients' images, resizes and cuts them for a vision tower, and puts them into prompts.

Used only in processes that may be killed: a hostile image may take long or crash a decoder.
"""
