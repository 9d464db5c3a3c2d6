"""Train a drafter: `python -m train +target=smollm2 drafter=eagle3` (values: conf/train.yaml)."""

from conf.cli import launch
from train.job import run

if __name__ == "__main__":
    launch("train", run)
