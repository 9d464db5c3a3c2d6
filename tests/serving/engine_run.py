"""Serve one drafter with real vLLM and count. Runs in vLLM's own environment: `python engine_run.py ASK.json OUT.json`.

Request: {"target", "speculative" (vLLM's own speculative config, null: none), "prompts" (token ids), "max_tokens",
"dtype", "batch"}.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main(request: dict) -> dict:
    """Generate greedily and read the engine's own speculation counters."""
    import vllm

    engine = vllm.LLM(
        model=request["target"],
        dtype=request["dtype"],
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=request["batch"],
        disable_log_stats=False,
        speculative_config=request["speculative"],
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=request["max_tokens"])
    prompts = [vllm.TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    counters = {}
    for metric in engine.get_metrics():
        if "spec_decode" in metric.name:
            counters[metric.name.rsplit(":", 1)[-1]] = metric.values if hasattr(metric, "values") else metric.value
    return {
        "engine_version": vllm.__version__,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "num_rounds": counters.get("spec_decode_num_drafts", 0),
        "num_accepted": counters.get("spec_decode_num_accepted_tokens", 0),
        "accepted_per_position": counters.get("spec_decode_num_accepted_tokens_per_pos", []),
    }


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
