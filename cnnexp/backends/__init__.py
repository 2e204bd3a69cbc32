"""The backends by name. Nothing is imported until a name is asked for: no CUDA and no torch to import `cnnexp`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from cnnexp.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from cnnexp.backends.protocol import Backend

BACKENDS: dict[str, str] = {
    "python": "python:Python",
    "numpy": "numpy:Numpy",
    "numpy-parallel": "numpy_parallel:NumpyParallel",
    "unrolled": "unrolled:Unrolled",
    "unrolled-parallel": "numpy_parallel:UnrolledParallel",
    "cpu-published": "cpu_published:CpuPublished",
    "cpu-published-argmax": "cpu_published:CpuPublishedArgmax",
    "cpu": "cpu:Cpu",
    "cpu-parallel": "cpu_parallel:CpuParallel",
    "cpu-simd": "cpu_simd:CpuSimd",
    "gpu-naive": "gpu_naive:GpuNaive",
    "gpu-shared-input": "gpu_shared:GpuSharedInput",
    "gpu-shared": "gpu_shared:GpuShared",
    "gpu-tuned": "gpu_tuned:GpuTuned",
    "gpu-fused": "gpu_fused:GpuFused",
    "gpu": "gpu_fused:GpuFused",  # the fastest: it takes every network
    "torch": "torch:Torch",
    "keras": "keras:Keras",
}
"""Name, as in `conf/backend/`, to `module:Class` under `cnnexp.backends`."""


def backend_class(name: str) -> type[Backend]:
    """Import and return the class of a backend.

    Raises:
        ConfigError: no backend has this name.
        BackendUnavailable: the machine lacks what the backend's module needs.
    """
    if name not in BACKENDS:
        raise ConfigError(f"backend={name!r}: unknown; legal: {', '.join(BACKENDS)}{did_you_mean(name, BACKENDS)}")
    module, cls = BACKENDS[name].split(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), cls)


def backend(name: str, **options) -> Backend:
    """Make a backend from its name and its options, the keys of `conf/backend/<name>.yaml`."""
    return backend_class(name)(**options)
