"""The job through its real command: every stack, checks, mending, interruptions, and uploads to a hub."""

import base64
import hashlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_export.check import faults_of
from tests.serve_export.exports import tiny_gguf
from tests.train.conftest import Launcher, environment

RUN = "outputs/train/head"
EAGLE3_STACKS = ("vllm", "speculators", "sglang", "trtllm", "hf")


def sha256(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*")) if path.is_file()
    }  # fmt: skip


@pytest.fixture(scope="module")
def trained(launcher: Launcher, tiny_args: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with one trained run and its evaluation."""
    cwd = tmp_path_factory.mktemp("work")
    launcher("train", tiny_args(Path(RUN), "epochs=1", "run_name=head"), cwd).succeeded()
    return cwd


@pytest.mark.parametrize("stack", EAGLE3_STACKS)
def test_stack_is_written_checked_and_described(trained: Path, launcher: Launcher, stack: str) -> None:
    done = launcher("serve_export", [f"checkpoint={RUN}", f"stack={stack}", f"output_dir=to/{stack}"], trained)
    folder = trained / "to" / stack
    assert "contract  holds" in done.succeeded().out
    assert faults_of(folder) == []
    checked = launcher("serve_export", [f"check=to/{stack}"], trained).succeeded()
    assert "contract  holds" in checked.out
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nbase_model: ") and card.count("vllm serve") == 2  # native, and of speculators
    assert "sglang.launch_server" in card and "trtllm-serve" in card and "llama-server" in card
    record = json.loads((folder / "export.json").read_text())
    assert record["serve_command"] in card and record["provenance"]["versions"]["torch"]
    if stack != "hf":
        assert record["logits_difference"] < 1e-4
    assert (folder / "trtllm.yaml").is_file() == (stack == "trtllm")


def test_own_format_is_a_checkpoint(trained: Path, launcher: Launcher, tiny_args: Callable[..., list[str]]) -> None:
    launcher("serve_export", [f"checkpoint={RUN}", "stack=hf", "output_dir=own"], trained).succeeded()
    manifest = trained / "own" / "manifest.json"
    original = manifest.read_text()
    manifest.write_text(original.replace("1", "2", 1))
    assert faults_of(trained / "own") == ["manifest.json is not the file that was exported"]
    manifest.write_text(original)
    still = ["optim=adamw", "optim.lr=1e-12", "optim.weight_decay=0", "epochs=1", "drafter.init_from=own"]
    launcher("train", tiny_args(Path("again"), *still), trained).succeeded()
    ours, theirs = (load_file(trained / run / "checkpoints/latest/model.safetensors") for run in (RUN, "again"))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-8) for name in ours)


def test_gguf_needs_the_targets_file(trained: Path, launcher: Launcher) -> None:
    argv = [f"checkpoint={RUN}", "stack=gguf", "output_dir=to/gguf"]
    refused = launcher("serve_export", argv, trained)
    assert refused.code == 2 and "target_gguf=FILE" in refused.err and not (trained / "to" / "gguf").exists()
    refused = launcher("serve_export", [*argv, f"target_gguf={tiny_gguf(trained / 'other.gguf', 9)}"], trained)
    assert refused.code == 2 and "has 9 tokens, the target 258" in refused.err
    refused = launcher("serve_export", [*argv, "target_gguf=nowhere.gguf"], trained)
    assert refused.code == 2 and "nowhere.gguf cannot be read" in refused.err
    launcher("serve_export", [*argv, f"target_gguf={tiny_gguf(trained / 'target.gguf')}"], trained).succeeded()
    assert faults_of(trained / "to" / "gguf") == []


def test_exporting_twice_gives_the_same_bytes(trained: Path, launcher: Launcher) -> None:
    for stack, more in (("vllm", []), ("gguf", [f"target_gguf={tiny_gguf(trained / 'same.gguf')}"])):
        argv = [f"checkpoint={RUN}", f"stack={stack}", f"output_dir=twice-{stack}", *more]
        launcher("serve_export", argv, trained).succeeded()
        first = sha256(trained / f"twice-{stack}")
        launcher("serve_export", argv, trained).succeeded()
        assert sha256(trained / f"twice-{stack}") == first


@pytest.mark.parametrize(
    "function",
    [
        "serve_export.job.write_text", "serve_export.check.compare_logits", "serve_export.job.write_json",
        "serve_export.job.require", "serve_export.job._put_in_place",
    ],
)  # fmt: skip
def test_interrupted_export_leaves_nothing_under_its_name(trained: Path, launcher: Launcher, function: str) -> None:
    place = trained / function / "head"
    argv = [f"checkpoint={RUN}", f"output_dir={place.relative_to(trained)}"]
    killed = launcher("serve_export", argv, trained, kill=(function, 1))
    assert killed.codes == [-signal.SIGKILL]
    assert not place.exists()
    launcher("serve_export", argv, trained).succeeded()
    before = sha256(place)
    launcher("serve_export", argv, trained, kill=(function, 1))
    assert sha256(place) == before  # what was there stays


def test_one_question_at_a_time(trained: Path, launcher: Launcher) -> None:
    for argv, came in (([], "none"), ([f"checkpoint={RUN}", "check=x"], "checkpoint and check")):
        refused = launcher("serve_export", argv, trained)
        assert (
            refused.code == 2
            and f"give one of checkpoint=RUN, check=FOLDER or doctor=FOLDER; got {came}" in refused.err
        )
    refused = launcher("serve_export", ["check=outputs"], trained)
    assert refused.code == 2 and "no export of ours; try doctor=outputs" in refused.err


def test_doctor_mends_and_the_mended_head_holds(
    trained: Path, launcher: Launcher, tiny_folder: Callable[..., Path]
) -> None:
    launcher("serve_export", [f"checkpoint={RUN}", "output_dir=sick"], trained).succeeded()
    sick = trained / "sick"
    config, tensors = json.loads((sick / "config.json").read_text()), load_file(sick / "model.safetensors")
    del config["eagle_aux_hidden_state_layer_ids"], config["rope_theta"]
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    (sick / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(sick / "model.safetensors"))
    for name in ("export.json", "README.md"):
        (sick / name).unlink()
    before = sha256(sick)
    argv = ["doctor=sick", f"target_path={tiny_folder('qwen3')}"]
    done = launcher("serve_export", argv, trained).succeeded()
    for name in ("absolute ids in d2t", "layer ids", "rotary positions"):
        assert f"- {name} (" in done.out
    mended = trained / "outputs/serve_export/sick-mended-vllm"
    assert "mended  outputs/serve_export/sick-mended-vllm" in done.out and faults_of(mended) == []
    assert sha256(sick) == before
    healthy = launcher("serve_export", ["doctor=outputs/serve_export/sick-mended-vllm", argv[1]], trained).succeeded()
    assert "nothing wrong was found" in healthy.out


def test_name_that_vllm_misreads_is_refused(
    launcher: Launcher, tiny_args: Callable[..., list[str]], tmp_path: Path
) -> None:
    argv = [a for a in tiny_args(Path("run")) if not a.startswith(("drafter.train_lm_head", "drafter.draft_vocab"))]
    launcher("train", [*argv, "drafter=medusa", "drafter.draft_vocab_size=null"], tmp_path).succeeded()
    refused = launcher("serve_export", ["checkpoint=run", "output_dir=my-eagle3/head"], tmp_path)
    assert refused.code == 2 and "'eagle3' in its path" in refused.err and not (tmp_path / "my-eagle3").exists()
    launcher("serve_export", ["checkpoint=run", "output_dir=head"], tmp_path).succeeded()
    assert faults_of(tmp_path / "head") == []


class Hub(BaseHTTPRequestHandler):
    """As much of the model hub as an upload needs."""

    files: ClassVar[dict[str, bytes]] = {}
    created: ClassVar[list[dict[str, Any]]] = []
    refuse: ClassVar[bool] = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.headers.get("Authorization") != "Bearer hf_test" or Hub.refuse:
            return self.answer(403, {"error": "no right to write here"})
        if self.path == "/api/repos/create":
            Hub.created.append(json.loads(body))
            return self.answer(200, {"url": f"{self.base}/me/head", "id": "me/head"})
        if "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            regular = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
            return self.answer(200, {"files": regular})
        if self.path == "/api/validate-yaml":
            assert "base_model: " in json.loads(body)["content"]
            return self.answer(200, {"errors": [], "warnings": []})
        for line in body.splitlines():
            row = json.loads(line)
            if row["key"] == "file":
                Hub.files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
        oid = "0" * 40
        return self.answer(200, {"commitUrl": f"{self.base}/me/head/commit/{oid}", "commitOid": oid, "success": True})

    def do_GET(self) -> None:
        self.answer(200, {"id": "me/head", "sha": "0" * 40, "siblings": [], "private": True})

    do_HEAD = do_GET

    @property
    def base(self) -> str:
        return f"http://{self.headers['Host']}"

    def answer(self, code: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_push_uploads_exactly_the_verified_folder(trained: Path, hub: str) -> None:
    env = environment() | {"HF_ENDPOINT": hub, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    argv = [sys.executable, "-m", "serve_export", f"checkpoint={RUN}", "output_dir=pushed", "push=me/head"]
    done = subprocess.run(argv, cwd=trained, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{hub}/me/head/commit/" in done.stdout
    made = Hub.created[-1]
    assert made["name"] == "head" and (made.get("private") is True or made.get("visibility") == "private")
    assert {name: hashlib.sha256(data).hexdigest() for name, data in Hub.files.items()} == sha256(trained / "pushed")
    Hub.refuse = True
    refused = subprocess.run(argv, cwd=trained, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert refused.returncode == 2 and "push=me/head" in refused.stderr and "complete: pushed" in refused.stderr
    assert faults_of(trained / "pushed") == []
