"""How many tokens of a request are guessed ahead and verified in one pass."""

#: Most of them: they travel in the headers of volumes.
MAX_DRAFTS = 15
#: Passes of nothing but drafts that may be in flight, ahead of the tokens that they assume.
MAX_AHEAD = 16
#: As many as pay.
AUTO_DRAFTS = -1
