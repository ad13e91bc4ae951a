"""Images of clients: decoded, cut to what a model's vision tower takes, shown in its prompt.

Used only in processes that may be killed: a hostile image may take long, or crash a decoder.
"""
