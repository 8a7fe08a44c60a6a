"""Loads the CPU's kernels into torch as soon as it has been imported, in every process of this environment."""

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path


class _Torch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            sys.meta_path.remove(self)  # here, and not where somebody only asks whether torch is installed
            run(module)
            _load(module)

        spec.loader.exec_module = exec_module
        return spec


def _load(torch):
    torch.ops.load_library(Path(__file__).parent / "late_cuda_kernels.so")
    # What only CUDA has falls back to compositions of kernels that both have.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
    # Of CUDA's, a process that has asked for the number of GPUs may not fork; of this, one that has used them.
    forked_late = []
    os.register_at_fork(after_in_child=lambda: forked_late.append(True) if torch.cuda._initialized else None)
    torch.cuda._is_in_bad_fork = lambda: bool(forked_late)


sys.meta_path.insert(0, _Torch())
