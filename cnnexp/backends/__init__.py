"""The backends by name. Nothing is imported until a name is asked for: no CUDA and no torch to import `cnnexp`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from cnnexp.errors import ConfigError, did_you_mean
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
    """Import and return the class of a backend; it raises what `backend` does, but for options."""
    return BACKENDS.find(name, "backend")


def backend(name: str, **options: Any) -> Backend:
    """Make a backend from its name and its options, the keys of `conf/backend/<name>.yaml`.

    Raises:
        ConfigError: no backend has this name, or it has no such option.
        BackendUnavailable: the machine lacks what it needs.
    """
    cls = backend_class(name)
    legal = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    for key, value in options.items():
        if key not in legal:
            known, near = ", ".join(legal) or "none", did_you_mean(key, legal)
            raise ConfigError(f"backend.{key}={value!r}: unknown key of {name}; legal: {known}{near}")
    return cls(**options)
