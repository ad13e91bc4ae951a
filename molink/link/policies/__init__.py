"""Channel policies: which volume may send rows now, their credit windows and predictions."""
