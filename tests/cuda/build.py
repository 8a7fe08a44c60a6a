"""Make an environment with torch's CUDA build, and emulated CUDA and NCCL in the place of NVIDIA's libraries.

    python -m tests.cuda.build FOLDER OTHER

``FOLDER`` gets a virtual environment (1.6 GB): the CUDA build is downloaded as ``pip`` is set up, and everything else
is that of the environment ``OTHER``. Any command of its Python then has GPUs: torch finds what it needs beside itself.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
HEADERS = ("nvidia-cuda-runtime<13.1", "nvidia-cuda-crt<13.1")
EMPTY = (
    "libcusparse.so.12 libcufft.so.12 libcufile.so.0 libcusparseLt.so.0 libcurand.so.10 libcublas.so.13 libnccl.so.2 "
    "libcuda.so.1 libcublasLt.so.13 libcudnn.so.9 libnvrtc.so.13 libcusolver.so.12 libcupti.so.13 libnvshmem_host.so.3"
).split()
WANTED = re.compile(r"(cu[A-Z]|cuda|__cuda|cublas|cudnn|cusparse|cufft|curand|cusolver|nccl|nvrtc|nvshmem|nvml|nvJit|cupti)")
VALUES = {"cudnnGetVersion": 92000, "cublasLtGetVersion": 130100, "cudnnGetCudartVersion": 13000}


def main(folder: Path, other: Path) -> None:
    site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    cuda, headers = site / "nvidia/cu13/lib", folder / "headers"
    if not (site / "torch/lib/libtorch_cuda.so").exists():
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        wheels = folder / "wheels"
        # "===": not a build for CPUs of the same version, such as 2.13.0+cpu.
        pip("download", "--no-deps", "-d", wheels, f"torch==={version('torch').partition('+')[0]}", *HEADERS)
        for wheel in wheels.glob("*.whl"):
            shutil.unpack_archive(wheel, site if wheel.name.startswith("torch-") else headers, "zip")
        shutil.rmtree(wheels)
        (site / "others.pth").write_text(f"import site; site.addsitedir({str(sysconfig.get_path('purelib'))!r})\n")
    assert Path(sys.prefix).resolve() == other.resolve(), f"run this with the Python of {other}"
    shutil.copy(HERE / "load.py", site / "late_cuda_load.py")
    (site / "late_cuda.pth").write_text("import late_cuda_load\n")
    cuda.mkdir(parents=True, exist_ok=True)
    torch = site / "torch"
    includes = [f"-I{headers}/nvidia/cu13/include", f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    shared = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", *includes]
    kernels = subprocess.Popen(
        [*shared, HERE / "kernels.cpp", "-o", site / "late_cuda_kernels.so", f"-L{torch}/lib"]
        + ["-Wl,--unresolved-symbols=ignore-all", "-lc10", "-ltorch_cpu", "-lc10_cuda"]
    )
    runtime = cuda / "libcudart.so.13"
    run(*shared, "-Wl,-soname,libcudart.so.13", HERE / "runtime.cpp", HERE / "nccl.cpp", "-o", runtime, "-lpthread")
    libraries = [library for library in (torch / "lib").glob("*.so*") if "gomp" not in library.name]
    missing = set().union(*(symbols(library, "undefined") for library in libraries)) - symbols(runtime, "defined")
    source = "#include <stdio.h>\n" + "".join(map(stub, sorted(filter(WANTED.match, missing))))
    for name in EMPTY:
        text = source if name in ("libcupti.so.13", "libcuda.so.1") else ""  # the driver's are looked up in its own
        command = ["gcc", "-w", "-fPIC", "-shared", f"-Wl,-soname,{name}", "-o", cuda / name, "-x", "c", "-"]
        also = ["-x", "none", "-Wl,--no-as-needed", runtime] if name == "libcuda.so.1" else []
        subprocess.run([*command, *also], input=text, text=True, check=True)
    if kernels.wait():
        raise SystemExit("kernels.cpp cannot be compiled")


def stub(name: str) -> str:
    """What nothing here needs says its name and fails."""
    if name in VALUES:
        return f"long {name}(void) {{ return {VALUES[name]}; }}\n"
    return f'long {name}(void) {{ fprintf(stderr, "[late_cuda] MISSING {name}\\n"); return 801; }}\n'


def symbols(library: Path, kind: str) -> set[str]:
    out = subprocess.run(["nm", "-D", f"--{kind}-only", library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in out.splitlines()}


def pip(*args: object) -> None:
    run(sys.executable, "-m", "pip", *args, "--quiet", "--disable-pip-version-check")


def run(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True)


if __name__ == "__main__":
    if (platform.system(), platform.machine()) != ("Linux", "x86_64") or not shutil.which("g++"):
        raise SystemExit("needs Linux on x86_64 and g++")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
