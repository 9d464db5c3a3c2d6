"""Measure a drafter: `python -m eval checkpoint=outputs/train/RUN` (values: conf/eval.yaml)."""

from conf.cli import launch
from eval.job import run

if __name__ == "__main__":
    launch("eval", run)
