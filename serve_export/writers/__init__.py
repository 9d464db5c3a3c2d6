"""Drafters as files: one module per format."""
