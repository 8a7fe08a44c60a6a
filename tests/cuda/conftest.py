"""These tests run where torch's CUDA build runs on a CPU (``make test-cuda``), and are collected nowhere else.

What the emulated CUDA has said (a copy beyond its memory, a thread on another rank's GPU, an error left behind, ...)
fails the run, whatever test it was in.
"""

import os
import re
import sys
from pathlib import Path

import pytest

collect_ignore_glob = [] if "late_cuda_load" in sys.modules else ["test_*.py"]

LEFT_OUT = {
    "bf16_true.*sgd|sgd.*bf16_true": "the CPU's fused SGD, which stands in for the GPU's, is wrong in bf16",
    "optimizer_of_ones_own|gives_a_plain_module|random_delays|takes_any_number_of": "has tensors of the host",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, reason in LEFT_OUT.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_sessionfinish(session: pytest.Session) -> None:
    log = Path(os.environ.get("LATE_CUDA_LOG", os.devnull))
    if not hasattr(session.config, "workerinput") and log.is_file() and log.read_text():
        print(f"\nFAILED: the emulated CUDA says in {log}:\n{log.read_text()[:4000]}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
