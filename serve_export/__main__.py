"""Export a drafter: `python -m serve_export checkpoint=outputs/train/RUN stack=vllm` (see conf/serve_export.yaml)."""

from conf.cli import launch
from serve_export.job import run

if __name__ == "__main__":
    launch("serve_export", run)
