"""The launcher of tests/train, for the commands of this job."""

from tests.train.conftest import launcher, tiny_args

__all__ = ["launcher", "tiny_args"]
