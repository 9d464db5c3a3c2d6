"""Checkpoint -> acceptance length and speed, measured with the embedded lossless decoder."""
