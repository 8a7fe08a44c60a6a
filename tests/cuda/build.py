"""Make an environment with torch's CUDA build, and emulated CUDA and NCCL in the place of NVIDIA's libraries.

    python -m tests.cuda.build FOLDER

``FOLDER`` gets a virtual environment (1.2 GB): the CUDA build is downloaded as ``pip`` is set up, and everything else
is that of the Python that runs this. Any command of ``FOLDER/bin/python`` then has GPUs: torch finds what it needs
beside itself. A second call builds only what has changed.
"""

from __future__ import annotations

import hashlib
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
EMPTY = re.split(
    " ",
    "libcusparse.so.12 libcufft.so.12 libcufile.so.0 libcusparseLt.so.0 libcurand.so.10 libcublas.so.13 libnccl.so.2 "
    "libcuda.so.1 libcublasLt.so.13 libcudnn.so.9 libnvrtc.so.13 libcusolver.so.12 libcupti.so.13 libnvshmem_host.so.3",
)
WANTED = re.compile(
    r"(cu[A-Z]|cuda|__cuda|cublas|cudnn|cusparse|cufft|curand|cusolver|nccl|nvrtc|nvshmem|nvml|nvJit|cupti)"
)
VALUES = {"cudnnGetVersion": 92000, "cublasLtGetVersion": 130100, "cudnnGetCudartVersion": 13000}


def main(folder: Path) -> None:
    site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    if not (site / "others.pth").exists():
        shutil.rmtree(folder, ignore_errors=True)
        download(folder, site)
    sources = [*sorted(HERE.glob("*.cpp")), HERE / "late.h", HERE / "load.py", Path(__file__)]
    text = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = folder / "built"
    if not stamp.exists() or stamp.read_text() != text:
        build(folder / "headers", site)
        stamp.write_text(text)


def download(folder: Path, site: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    wheels = folder / "wheels"
    # "===": not a build for CPUs of the same version, such as 2.13.0+cpu.
    torch = f"torch==={version('torch').partition('+')[0]}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run(*pip, "-d", wheels, torch, *HEADERS)
    for wheel in wheels.glob("*.whl"):
        shutil.unpack_archive(wheel, site if wheel.name.startswith("torch-") else folder / "headers", "zip")
    shutil.rmtree(wheels)
    (site / "others.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")


def build(headers: Path, site: Path) -> None:
    shutil.copy(HERE / "load.py", site / "late_cuda_load.py")
    (site / "late_cuda.pth").write_text("import late_cuda_load\n")
    torch, cuda = site / "torch", site / "nvidia/cu13/lib"
    cuda.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{headers}/nvidia/cu13/include", f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    shared = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", *map(str, includes)]
    unresolved = [f"-L{torch}/lib", "-Wl,--unresolved-symbols=ignore-all", "-lc10", "-ltorch_cpu", "-lc10_cuda"]
    kernels = subprocess.Popen([*shared, HERE / "kernels.cpp", "-o", site / "late_cuda_kernels.so", *unresolved])
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


def run(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True)


if __name__ == "__main__":
    if (platform.system(), platform.machine()) != ("Linux", "x86_64") or not shutil.which("g++"):
        raise SystemExit("torch's CUDA build on a CPU needs Linux on x86_64, and g++")
    try:
        main(Path(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(error.cmd[:4])} has failed") from None
