"""Target features -> a trained drafter checkpoint."""
