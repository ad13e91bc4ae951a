"""Which volume may send how many rows now: the channel policies, their credits and predictions."""
