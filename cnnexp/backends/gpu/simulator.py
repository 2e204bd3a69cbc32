"""A fault of Numba's CUDA simulator, mended: the threads of a block must get the same shared array.

Its own `cuda.shared.array` looks the array up and then stores a new one if there was none. Its threads are Python
threads, so two of them may both find none and go on with an array each: a correct kernel then gives a wrong result,
now and then (5 of 300 launches of 32 threads when the interpreter switches threads often).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba.core import types
from numba.cuda.simulator import kernelapi
from numba.np import numpy_support


def mend_shared_arrays() -> None:
    """Make `cuda.shared.array` of the simulator safe. Idempotent."""
    kernelapi.FakeCUDAShared.array = _shared_array


def _shared_array(self: Any, shape: Any, dtype: Any, alignment: int | None = None) -> np.ndarray:
    """Return the block's array of the calling line of a kernel, as the simulator tells arrays apart."""
    caller = sys._getframe(1)
    if isinstance(dtype, types.Type):
        dtype = numpy_support.as_dtype(dtype)
    # of a dict, one call is one step for every thread, and whoever comes second gets the first one's array
    return self._allocations.setdefault((caller.f_code.co_filename, caller.f_lineno), np.empty(shape, dtype))
