"""Which volume may send how many rows now: the lane policies, their credits and predictions."""
