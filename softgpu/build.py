"""The driver, compiled at first use into a folder of the user's cache: `cnnexp/softgpu/<hash>/libcuda.so.1`."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = ("engine.h", "operations.h", "engine.c", "driver.c")
TRANSLATION = ("assembler.py", "cubin.py", "numba_hook.py", "ptx.py")  # what makes the images that the driver loads
# one product and one sum are never fused unless the PTX says so; vectors as wide as this machine has
FLAGS = (
    *("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing"),
    *("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"),
)


class Unavailable(Exception):
    """The software GPU cannot be built here: says what is missing."""


@functools.cache
def library() -> Path:
    """Return the driver, compiled if these sources never were with this compiler.

    Raises:
        Unavailable: no C compiler, no CUDA headers, or the compiler fails.
    """
    folder = Path(__file__).parent
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise Unavailable("the software GPU needs a C compiler (cc)")
    headers = _headers()
    translation = hashlib.sha256(b"".join((folder / name).read_bytes() for name in TRANSLATION)).hexdigest()[:8]
    flags = [*FLAGS, f'-DTRANSLATION="{translation}"']
    texts = b"".join((folder / name).read_bytes() for name in SOURCES)
    key = hashlib.sha256(texts + " ".join((compiler, *flags, _processor())).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cnnexp" / "softgpu" / key
    made = cache / "libcuda.so.1"
    if made.exists():
        return made
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        target = Path(scratch) / "libcuda.so.1"
        sources = [str(folder / name) for name in SOURCES if name.endswith(".c")]
        command = [compiler, *flags, f"-I{headers}", "-o", str(target), *sources, "-lm", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"the software GPU does not compile: {done.stderr.strip()[-500:]}")
        target.replace(made)  # at once, so that no other process loads half a file
    return made


def unavailable() -> str:
    """Return why the software GPU cannot be had here, or "": for `pytest.mark.skipif`."""
    try:
        library()
    except Unavailable as error:
        return str(error)
    return ""


def _headers() -> str:
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        raise Unavailable("the software GPU runs numba-cuda: install cnnexp[gpu]") from None
    found = find_nvidia_header_directory("cudart")
    if found is None:
        raise Unavailable("the software GPU is compiled with cuda.h: install cnnexp[gpu]")
    return found


def _processor() -> str:
    """Return what distinguishes processors: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
