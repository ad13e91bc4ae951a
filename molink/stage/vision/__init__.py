"""Vision towers: turn an image's pixels into rows of the decoder."""
