"""How many tokens of a request are guessed ahead and verified in one pass."""

#: Most of them: they travel in the headers of volumes.
MAX_DRAFTS = 15
#: As many as pay.
AUTO_DRAFTS = -1
