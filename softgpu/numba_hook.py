"""What the software GPU needs from numba-cuda: a kernel's PTX beside its cubin, and to see a launch's arguments.

A driver gets a cubin, machine code that only a GPU executes. So where Numba links a kernel, the same LTO-IR is linked a
second time, to PTX, and what goes to the driver is `assembler`'s image of it. Nothing else is changed.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

edit_ptx: Callable[[str], str] = str  # what becomes of a kernel's PTX: for tests that put a fault in it

PATCHES = {"numba.cuda.codegen": "_patch_codegen", "numba.cuda.dispatcher": "_patch_dispatcher"}


def install() -> None:
    """Prepare numba-cuda as soon as it is imported."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module, then has it patched once it is loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in PATCHES:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = _Loader(spec.loader, globals()[PATCHES[name]])
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, patch: Any) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


def _patch_codegen(codegen: ModuleType) -> None:
    library = codegen.CUDACodeLibrary
    get_cubin = library.get_cubin

    def get_image(self: Any, cc: Any = None) -> Any:
        from cuda.core import ObjectCode

        from softgpu import assembler, cubin, ptx

        cc = self._ensure_cc(cc)
        made = self.__dict__.setdefault("_softgpu_images", {})
        if cc not in made:
            code = bytes(get_cubin(self, cc).code)
            text = self.get_lto_ptx(cc) if self._lto else self.get_asm_str(cc)
            (entry,) = ptx.parse(edit_ptx(text))
            made[cc] = ObjectCode.from_cubin(assembler.image(entry, cubin.resources(code, entry.name)))
        return made[cc]

    library.get_cubin = get_image


def _patch_dispatcher(dispatcher: ModuleType) -> None:
    kernel = dispatcher._Kernel
    launch = kernel.launch

    def checked(self: Any, args: Any, *rest: Any, **named: Any) -> Any:
        wrong = _wrong_arguments(self, args)
        if wrong:
            add_finding("argcheck", f"{wrong}, in {self.entry_name}")
        if len(args) != len(self.argument_types):
            raise TypeError(wrong)  # a driver would read past the arguments
        return launch(self, args, *rest, **named)

    kernel.launch = checked


def _wrong_arguments(kernel: Any, args: Any) -> str:
    """Return how arguments differ from the types that a kernel was compiled for, or ""."""
    from numba.cuda import types
    from numba.cuda.typing.typeof import Purpose, typeof

    promised = kernel.argument_types
    if len(args) != len(promised):
        return f"{len(args)} launch arguments for a kernel of {len(promised)}"
    for place, (given, wanted) in enumerate(zip(args, promised, strict=True)):
        found = getattr(given, "_numba_type_", None) or typeof(given, Purpose.argument)
        if isinstance(wanted, types.Array):
            same = isinstance(found, types.Array) and (
                (found.dtype, found.ndim) == (wanted.dtype, wanted.ndim) and found.layout in (wanted.layout, "C")
            )
        else:
            same = found == wanted
        if not same:
            return f"launch argument {place} is {found}, the kernel takes {wanted}"
    return ""


def add_finding(check: str, text: str) -> None:
    """Add to what the driver's checks have found."""
    ctypes.CDLL("libcuda.so.1").softgpu_note(check.encode(), text.encode())
