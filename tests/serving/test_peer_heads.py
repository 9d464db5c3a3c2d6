"""A real head that a peer's code has saved is accepted as it was: `make test-peers`."""

from typing import Any

import pytest
from safetensors.torch import load_file

from tests.peers_environment import run_peers

pytestmark = pytest.mark.peers
SHORT = ("dtype=float32", "corpus.max_conversations=12", "max_tokens=64")


@pytest.mark.parametrize(("peer", "stack"), [("speculators", "speculators"), ("specforge", "sglang")])
def test_a_head_that_they_saved_is_accepted_as_before(
    served: Any, checkpoint: str, smollm2_folder: str, peer: str, stack: str
) -> None:
    ours, theirs = served.output / f"for-{peer}", served.output / f"by-{peer}"
    served.command("serve_export", f"checkpoint={checkpoint}", f"stack={stack}", "dtype=float32", f"output_dir={ours}")
    target = [smollm2_folder] if peer == "specforge" else []
    run_peers("resave.py", peer, ours, theirs, *target)
    assert "embed_tokens.weight" in load_file(theirs / "model.safetensors")  # it is theirs, with their copies
    before = served.evaluate(f"before-{peer}", f"checkpoint={checkpoint}", *SHORT)
    head = ["+target=smollm2", "+drafter=eagle3", f"drafter.init_from={theirs}"]
    after = served.evaluate(f"after-{peer}", *head, *SHORT)
    assert after.answers == before.answers
    lengths = [found.summary["acceptance_length_decoded"] for found in (before, after)]
    print(f"\nsaved by {peer}: {lengths}")
    assert lengths[0] == lengths[1] > 1.1  # a head that drafts nothing right would agree with anything
