"""Found first on the path of a process that runs on the software GPU: prepares numba-cuda when it is imported."""

from softgpu import numba_hook

numba_hook.install()
