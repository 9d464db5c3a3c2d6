"""Inspect a corpus before training on it: `python -m data +target=smollm2 corpus=sample` (values: conf/data.yaml)."""

from conf.cli import launch
from data.job import run

if __name__ == "__main__":
    launch("data", run)
