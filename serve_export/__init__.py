"""Checkpoint -> folders that inference engines load, verified before they are named."""
