"""Conversations -> token ids -> packed batches -> what the frozen target makes of them."""
