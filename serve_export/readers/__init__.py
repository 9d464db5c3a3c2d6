"""Independent readers of exported files: plain PyTorch from the formats' formulas, no code shared with the drafters."""
