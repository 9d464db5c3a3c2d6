"""The launcher of tests/train, for whole commands."""

from tests.train.conftest import launcher, tiny_args

__all__ = ["launcher", "tiny_args"]
