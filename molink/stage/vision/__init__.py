"""Vision towers: from the pixels of an image to rows of the decoder."""
