"""The drafter heads: one file per family, behind the interface of `train.drafters.base`."""
