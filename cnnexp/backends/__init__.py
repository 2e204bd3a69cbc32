"""The backends by name. Nothing is imported until a name is asked for: no CUDA and no torch to import `cnnexp`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cnnexp.system.registry import Registry

if TYPE_CHECKING:
    from cnnexp.backends.protocol import Backend

BACKENDS: Registry[Backend] = Registry(
    "backend",
    {
        "python": "plain.python:Python",
        "numpy": "plain.numpy:Numpy",
        "numpy-parallel": "plain.numpy_parallel:NumpyParallel",
        "unrolled": "plain.unrolled:Unrolled",
        "unrolled-parallel": "plain.numpy_parallel:UnrolledParallel",
        "cpu-published": "cpu.published:CpuPublished",
        "cpu-published-argmax": "cpu.published:CpuPublishedArgmax",
        "cpu": "cpu.sequential:Cpu",
        "cpu-parallel": "cpu.parallel:CpuParallel",
        "cpu-simd": "simd:CpuSimd",
        "gpu-naive": "gpu.naive:GpuNaive",
        "gpu-shared-input": "gpu.shared:GpuSharedInput",
        "gpu-shared": "gpu.shared:GpuShared",
        "gpu-tuned": "gpu.tuned:GpuTuned",
        "gpu-fused": "gpu.fused:GpuFused",
        "gpu": "gpu.fused:GpuFused",  # the fastest: it takes every network
        "torch": "peers.torch:Torch",
        "keras": "peers.keras:Keras",
    },
    package=__name__,
)


def backend_class(name: str) -> type[Backend]:
    """Import and return the class of a backend.

    Raises:
        ConfigError: no backend has this name.
        BackendUnavailable: the machine lacks what the backend's module needs.
    """
    return BACKENDS.find(name, "backend")


def backend(name: str, **options: Any) -> Backend:
    """Make a backend from its name and its options, the keys of `conf/backend/<name>.yaml`."""
    return backend_class(name)(**options)
