"""The kernels of `cpu-simd` as machine code for any CPU that LLVM knows, run where this machine can.

Nothing of Numba is in between, so a network takes a third of a second, and CPUs of another architecture are no
different until their code is to run.
"""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import dataclass

import llvmlite.binding as llvm
import numpy as np
import reference
from llvmlite import ir

from cnnexp import SGD, Totals
from cnnexp.backends.simd.algorithms import update
from cnnexp.backends.simd.compiler.emit import FLOAT, INDEX, call_kernels
from cnnexp.backends.simd.compiler.host import target_of
from cnnexp.backends.simd.layouts import aligned_zeros
from cnnexp.backends.simd.runtime.program import make_plan

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()


@dataclass(frozen=True)
class Cpu:
    """A CPU as LLVM names it.

    Attributes:
        architecture: x86_64 or aarch64.
        features: comma-separated, each with its sign, as NUMBA_CPU_FEATURES has them.
        has, lacks: patterns of machine code that two convolutions must hold, and that no code may.
    """

    architecture: str
    name: str
    features: str
    has: tuple[str, ...]
    lacks: tuple[str, ...]

    @property
    def triple(self) -> str:
        return f"{self.architecture}-unknown-linux-gnu"

    @property
    def target(self):
        return target_of(self.triple, self.features)

    def machine(self, codemodel: str = "small") -> llvm.TargetMachine:
        """Return LLVM's code generator; in the small model a call names the function that it calls."""
        options = {"cpu": self.name, "features": self.features, "opt": 3, "codemodel": codemodel}
        return llvm.Target.from_triple(self.triple).create_target_machine(**options)

    @property
    def runs_here(self) -> bool:
        """Whether this machine has all its features, whatever Numba has been told to compile for."""
        here = {name for name, present in llvm.get_host_cpu_features().items() if present}
        wanted = {feature.removeprefix("+") for feature in self.features.split(",") if feature}
        return llvm.get_process_triple().startswith(self.architecture) and wanted <= here


SSE2 = "+cx8,+fxsr,+mmx,+sse,+sse2"
SSE4 = f"{SSE2},+sse3,+ssse3,+sse4.1,+sse4.2,+cx16,+popcnt"
AVX = f"{SSE4},+avx"
AVX2 = f"{AVX},+avx2,+fma,+bmi,+bmi2,+f16c,+lzcnt,+movbe"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
VEX, YMM, FMA, ZMM = r"\bvmovups\b", r"%ymm\d", r"\bvf(n?)m(add|sub)\d", r"%zmm\d|%k[1-7]\b"
NO_X86, SVE, UNALIGNED_SPILL = r"%[xyz]mm", r"\bz\d+\.[bhsd]\b|\bp\d+/[mz]", r"\bv?movup[sd]\b.*\(%rsp\)"

CPUS = {
    "sse2": Cpu("x86_64", "x86-64", SSE2, (r"\bmulps\b",), (VEX, YMM, FMA, ZMM, r"\bpopcnt", r"\bpshufb|\bblendv")),
    "sse4": Cpu("x86_64", "nehalem", SSE4, (r"\bmulps\b", r"\bpmovzxbd\b"), (VEX, YMM, FMA, ZMM)),
    "avx": Cpu("x86_64", "sandybridge", AVX, (r"\bvmulps\b.*%ymm",), (FMA, ZMM, r"\bvperm(ps|d)\b|\bvpaddd\b.*%ymm")),
    "avx2": Cpu("x86_64", "haswell", AVX2, (r"\bvfmadd\d+ps\b.*%ymm", r"\bvperm(ps|d)\b"), (ZMM,)),
    "avx512": Cpu("x86_64", "skylake-avx512", AVX512, (r"\bvfmadd\d+ps\b.*%zmm", r"\bvcompressps\b"), ()),
    "generic": Cpu("x86_64", "generic", "", (r"\bmulps\b",), (VEX, YMM, FMA, ZMM, r"\bpopcnt")),
    "cortex-a53": Cpu("aarch64", "cortex-a53", "+fp-armv8,+neon", (r"\bfmla\b",), (NO_X86, SVE)),
    "neoverse-n1": Cpu("aarch64", "neoverse-n1", "+fp-armv8,+neon,+lse,+dotprod", (r"\bfmla\b",), (NO_X86, SVE)),
    "apple-m1": Cpu("aarch64", "apple-m1", "+fp-armv8,+neon,+lse,+dotprod", (r"\bfmla\b",), (NO_X86, SVE)),
}


def add_function(module: ir.Module, name: str, target, kernels, buffers: list[ir.Type]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [*(buffer.as_pointer() for buffer in buffers), INDEX])
    function = ir.Function(module, kind, name)
    builder = ir.IRBuilder(function.append_basic_block())
    call_kernels(builder, name, target, kernels, list(function.args))
    builder.ret_void()


def optimized(written: ir.Module, cpu: Cpu) -> llvm.ModuleRef:
    """Return a module for a CPU after LLVM's passes, those that Numba runs."""
    written.triple, machine = cpu.triple, cpu.machine()
    module = llvm.parse_assembly(str(written))
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization, options.slp_vectorization = True, False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def checked_assembly(cpu: Cpu, module: llvm.ModuleRef) -> str:
    """Return the assembly, looked over for what the CPU cannot execute and for calls of functions that do not exist."""
    text = cpu.machine().emit_assembly(module)
    assert "llvm." not in text, "an intrinsic has become a call"
    labels = set(re.findall(r'^"?([^\s"#/]+?)"?:', text, re.MULTILINE))
    called = set(re.findall(r'^\s+(?:callq?|bl|blr)\s+"?([^\s"]+)', text, re.MULTILINE))
    assert called <= labels | {"memset", "memcpy", "memset@PLT", "memcpy@PLT"}, called - labels
    for pattern in (*cpu.lacks, UNALIGNED_SPILL):
        found = re.search(rf".*({pattern}).*", text)
        assert not found, f"{cpu.name} has no {found[0].strip()}"
    return text


class KernelProgram:
    """As much of a `Program` as one step of SGD needs: softmax cross-entropy, a tile of images at a time."""

    def __init__(self, cpu: Cpu, network, batch_size: int, target) -> None:
        self._cpu, self.plan, written = cpu, make_plan(network, target, batch_size), ir.Module("kernels")
        plan, step = self.plan, [("update", functools.partial(update.update, optimizer=SGD()))]
        add_function(written, "gather", plan.target, plan.gather["float32"], [FLOAT, INDEX, FLOAT])
        add_function(written, "forward", plan.target, plan.forward, [FLOAT] * 3)
        add_function(written, "backward", plan.target, [*plan.backward, *plan.gradients], [FLOAT] * 3)
        add_function(written, "update", plan.target, step, [FLOAT] * 5)
        module = optimized(written, cpu)
        self._module = module.clone()
        if cpu.runs_here:
            self._engine = llvm.create_mcjit_compiler(module, cpu.machine("jitdefault"))
            self._engine.finalize_object()
        self._parameters, self._gradients = aligned_zeros((2, plan.parameters.size))
        self._arena = plan.arena.make(1)[0]

    def read(self) -> str:
        """Return the assembly, looked over."""
        return checked_assembly(self._cpu, self._module)

    def restore(self, state) -> None:
        self.plan.parameters.pack(state["parameters"], self._parameters)

    def state(self):
        return {"parameters": self.plan.parameters.unpack(self._parameters)}

    def load(self, images, labels):
        return images, labels

    def predict(self, handle):
        images, _ = handle
        tiles = np.array_split(np.arange(len(images)), -(-len(images) // self.plan.arena.images))
        return np.concatenate([self._forward(images, tile) for tile in tiles])

    def gradients(self, handle, indices):
        images, labels = handle
        losses, hits = 0.0, 0
        for tile in np.array_split(indices, -(-len(indices) // self.plan.arena.images)):
            scores = self._forward(images, tile)
            loss, gradient = reference.softmax_cross_entropy(scores.astype(np.float64), labels[tile])
            self._rows(self.plan.d_scores, len(tile))[...] = gradient * (len(tile) / len(indices))
            self._run("backward", self._parameters, self._gradients, self._arena, len(tile))
            losses, hits = losses + loss.sum(), hits + (scores.argmax(axis=1) == labels[tile]).sum()
        found = self.plan.parameters.unpack(self._gradients)
        self._gradients[...] = 0
        return Totals(losses, hits, len(indices)), found

    def apply(self, gradient, rate) -> None:
        numbers = np.array([rate, *SGD().constants(1)], np.float32)
        slots = aligned_zeros((2, len(self._parameters)))
        self.plan.parameters.pack(gradient, self._gradients)
        self._run("update", self._parameters, self._gradients, *slots, numbers, len(self._parameters))

    def _forward(self, images, tile):
        self._run("gather", images, tile.astype(np.int64), self._arena, len(tile))
        self._run("forward", self._parameters, self._gradients, self._arena, len(tile))
        return self._rows(self.plan.scores, len(tile)).copy()

    def _rows(self, matrix, count: int):
        rows = self._arena[int(matrix.offset) :][: count * matrix.stride]
        return rows.reshape(count, matrix.stride)[:, : matrix.size]

    def _run(self, name: str, *arguments) -> None:
        *buffers, count = arguments
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(buffers), ctypes.c_int64)
        kind(self._engine.get_function_address(name))(*(buffer.ctypes.data for buffer in buffers), count)


def assembly_of(cpu: Cpu, target, kernels, buffers: list[ir.Type]) -> str:
    """Return the assembly of one function that runs kernels, looked over."""
    module = ir.Module("kernels")
    add_function(module, "kernels", target, kernels, buffers)
    return checked_assembly(cpu, optimized(module, cpu))


def product_loops(text: str) -> list[str]:
    """Return the innermost loops of x86's assembly that multiply vectors by numbers that they read one by one."""
    loops = [body for _, body in re.findall(r"^(\.L\w+):.*\n((?:\s.*\n)+?)\s+j\w+\s+\1$", text, re.MULTILINE)]
    one_by_one = re.compile(r"broadcastss\s+\S*\((?!%rip)|\((?!%rip)[^)]*\)\{1to")
    return [loop for loop in loops if loop.count("vfmadd") >= 8 and len(one_by_one.findall(loop)) >= 3]
