"""The program: NumPy's layouts outside, this backend's inside, and the threads between."""

import ctypes
import functools
import math
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from cnnexp.backends.cache import load_or_make, program_key
from cnnexp.backends.parts import Part
from cnnexp.backends.protocol import Program, Rate, State, rate_of_steps
from cnnexp.backends.simd.algorithms.batch_norm import FIRST
from cnnexp.backends.simd.algorithms.cost import HEAVY
from cnnexp.backends.simd.algorithms.dropout import KEYS
from cnnexp.backends.simd.compiler import entry
from cnnexp.backends.simd.compiler.emit import Target
from cnnexp.backends.simd.compiler.entry import APPLY, GRADIENTS, LINE, TRAIN, Call
from cnnexp.backends.simd.compiler.native import Function, MachineCode, address_of
from cnnexp.backends.simd.general import Calls
from cnnexp.backends.simd.layouts import aligned_zeros, round_up
from cnnexp.backends.simd.lowering import FEWEST_IN_A_TILE, Plan
from cnnexp.backends.simd.runtime import compilation
from cnnexp.backends.simd.runtime.adaptive_threads import AdaptiveThreads
from cnnexp.backends.simd.runtime.thread_pool import Helpers, ThreadPool
from cnnexp.backends.state import PendingAverages, complete
from cnnexp.errors import DataError
from cnnexp.network import Network
from cnnexp.network.folding import Folded
from cnnexp.network.losses import Loss, Totals, check_loss
from cnnexp.network.noise import layer_key
from cnnexp.optimizers import SGD, Optimizer
from cnnexp.system import child

LARGEST_ARENA = 20 << 20
"""Bytes of activations per thread, besides as many as of parameters, past which no tile grows. With 40 MB the largest
networks gained 2 % at most; VGG-11, whose 37 MB of parameters a tile goes over, takes by 16 images 0.88 of 8's time."""

MOST_IMAGES = 128
"""Of a tile whose weights leave L2. By 128, not 64, wide MLP takes 0.9 of the time (AVX2, one thread, batch 128)."""

L3_SHARE_BYTES = 4 << 20
"""Bytes of L3 that are a core's when all cores work, 1.4 to 4 MB on servers; no file says of how many."""

SMALL_SHARE = 0.15
"""Part of the multiply-adds a CPU can do that the smallest networks reach: 784-30-10 and less, measured."""

THREAD_CYCLES = 100_000
"""Cycles of a step, some 15 us, that are worth a thread: two beside other work may take 20 times as long as one."""

WEIGHT_PASSES = 6
"""How much larger than the parameters activations must be to outweigh them."""

NEAR = 1.06
"""How much longer than the least an image may take, by the cost model, in a part of a vector that stays near."""

PREDICTED = 128
"""Images that training predicts at once, at least: it evaluates whole splits."""

ROWS = 1024
"""Images that a call of the compiled function predicts, at most: as long may work go on after a Ctrl-C."""

WAKING_CYCLES = 600_000
"""Cycles that a thread must have to do for it to be woken, some 150 us: it begins 50 to 100 us later."""

SOON_S = 1e-3
"""Seconds after which a call no longer follows the one before: threads wait so long for the next."""

SPINS = 20_000, 1_000
"""Turns of their waiting loop where calls follow each other, 0.4 to 1 ms on x86, and where they do not."""


@dataclass(frozen=True)
class LoadedSplit:
    """A loaded split, flat.

    Attributes:
        bytes_, floats: the images, uint8 or float32; the other is empty.
        nan_mask: float32 (N,), NaN where an image holds one, else 0: a maximum may lose a NaN on the way to the loss.
        labels: int32 (N,).
    """

    bytes_: np.ndarray
    floats: np.ndarray
    nan_mask: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


class SimdProgram(Program[LoadedSplit]):
    """A `Program` (see `protocol`): one compiled function that all threads run together.

    Args:
        target: the CPU. threads: how many, this one included.
    """

    def __init__(
        self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int, target: Target, threads: int
    ) -> None:
        check_loss(network, loss)
        self.network, self.loss, self.optimizer, self.batch_size = network, loss, optimizer, batch_size
        started = time.perf_counter()
        if batch_size == 1 and not network.running and not target.clocks:  # a clock has one reader
            target = replace(target, parts=threads)
        plan = make_plan(network, target, -(-batch_size // threads))
        with ThreadPoolExecutor(1) as beside:  # the two compile at once
            forward = beside.submit(ForwardProgram, network, loss, optimizer, PREDICTED, target, threads)
            try:
                self._work = _function((network, loss, optimizer, target, plan.vectors, plan.least))
                self._forward = forward.result()
            except BaseException:
                child.end_all()  # Ctrl-C, too, is not to wait for what compiles beside
                raise
        self._rows, self._layout, self._outputs = plan.explain(threads), plan.parameters, plan.scores.size
        self._parameters = aligned_zeros((plan.parameters.size,))
        self._slots = aligned_zeros((2, plan.parameters.size))
        self._gradients = aligned_zeros((threads, plan.parameters.size))
        tiles = -(-batch_size // threads) if plan.seams else 1
        self._arenas = plan.arena.make(threads, -(-tiles // plan.arena.images))
        self._calls = Calls(plan.nodes, plan, self._arenas)
        self._totals, self._flags = np.zeros((threads, LINE)), np.zeros(threads * LINE, np.int64)
        self._counts = np.zeros((threads, round_up(FIRST + len(self._arenas), LINE)), np.int64)
        self._running = aligned_zeros((network.running_count + target.lanes,))
        self._averages = self._running[: network.running_count]
        write = functools.partial(np.copyto, self._averages)
        self.pending: PendingAverages = PendingAverages(network, self._averages.copy, write)
        self._step, self._seed, self._drawing = 0, 0, [node.name for node in plan.dropouts]
        self._clocks, self._ticks = plan.clocks, np.zeros(len(plan.clocks.parts), np.int64)
        self._readings: list[tuple[float, int]] = []
        self._pool, self._adaptive = ThreadPool(threads), AdaptiveThreads(threads, trials=not plan.clocks.on)
        weakref.finalize(self, self._pool.close)
        self.compile_s = time.perf_counter() - started

    def explain(self) -> list[Part]:
        return self._rows

    def load(self, images: np.ndarray, labels: np.ndarray) -> LoadedSplit:
        labels, classes = np.ascontiguousarray(labels, np.int32), 2 if self.loss.is_binary else self._outputs
        if len(labels) != len(images):
            raise DataError(f"{len(images)} images but {len(labels)} labels")
        if len(images) and not (labels.min() >= 0 and labels.max() < classes):
            raise DataError(
                f"labels {labels.min()} to {labels.max()}: the network distinguishes {classes} classes, from 0"
            )
        flat = self._forward.load(images, labels).reshape(-1, math.prod(self.network.input_shape))
        if flat.dtype == np.uint8:
            return LoadedSplit(flat.reshape(-1), _NO_SPLIT.floats, np.zeros(len(flat), np.float32), labels)
        mask = np.where(np.isnan(flat).any(axis=1), np.float32(np.nan), np.float32(0))
        return LoadedSplit(_NO_SPLIT.bytes_, flat.reshape(-1), mask, labels)

    def train(self, handle: LoadedSplit, order: np.ndarray, rate: Rate) -> Totals:
        self.pending.drop()
        order, rates = _indices(order, handle), rate_of_steps(rate, len(order), self.batch_size)
        totals = Totals(0.0, 0, 0)
        while (start := totals.count) < len(order):
            threads, steps = self._adaptive.next()
            part, first = order[start : start + steps * self.batch_size], start // self.batch_size
            began = time.perf_counter()
            totals += self._run(TRAIN, handle, part, rates[first : first + steps], threads=threads)
            self._adaptive.took(threads, -(-len(part) // self.batch_size), time.perf_counter() - began)
        return totals

    def gradients(self, handle: LoadedSplit, indices: np.ndarray) -> tuple[Totals, np.ndarray]:
        indices = _indices(indices, handle)
        if self.network.running and len(indices) > self.batch_size:
            raise ValueError(f"{len(indices)} images in a batch of at most {self.batch_size}")
        gradients = aligned_zeros(self._gradients.shape)  # a step's own have no page for weights that threads own
        with self.pending.hold():
            totals = self._run(GRADIENTS, handle, indices, into=gradients)
        return totals, self._layout.unpack(functools.reduce(np.add, gradients))

    def warm(self, handle: LoadedSplit, indices: np.ndarray) -> None:
        self.gradients(handle, indices)
        self.pending.drop()

    def apply(self, gradient: np.ndarray, rate: float) -> None:
        self.pending.commit()
        self._layout.pack(gradient, self._gradients[0])
        self._run(APPLY, _NO_SPLIT, np.empty(0, np.int64), rate)

    def predict(self, handle: LoadedSplit) -> np.ndarray:
        self._pool.drain()
        parameters, seed = self._layout.unpack(self._parameters), np.asarray(self._seed)
        self._forward.take({"parameters": parameters, "running": self._averages, "seed": seed})
        pixels = handle.bytes_ if len(handle.bytes_) else handle.floats
        return self._forward.predict(pixels.reshape(len(handle), *self.network.input_shape))

    def state(self) -> State:
        self._pool.drain()
        unpack, names = self._layout.unpack, self.optimizer.slots
        slots = {name: unpack(slot) for name, slot in zip(names, self._slots, strict=False)}
        more = {"seed": np.asarray(self._seed, np.int64)} if self._drawing else {}
        more |= {"running": self._averages.copy()} if self.network.running else {}
        return {"parameters": unpack(self._parameters), "step": np.asarray(self._step, np.int64), **slots, **more}

    def restore(self, state: State) -> None:
        self._pool.drain()
        whole = complete(state, self.network, self.optimizer)
        # no page of the slots that the optimizer does not have is ever touched
        for name, target in zip(("parameters", *self.optimizer.slots), (self._parameters, *self._slots), strict=False):
            target[...] = 0  # also what rounds up the parameters, which a lost run may have left as NaN
            self._layout.pack(whole[name], target)
        if self.network.running:
            self._averages[...] = whole["running"]
        self._step, self._seed = int(whole["step"]), int(whole.get("seed", 0))
        self.pending.drop()

    def clocked(self) -> list[tuple[Part, float]]:
        """As `Program.clocked`; empty where the target has no clocks."""
        if len(self._readings) < 2:
            return []
        (began_s, began), (ended_s, ended) = self._readings
        tick_s = (ended_s - began_s) / (ended - began) / len(self._gradients)
        parts = zip(self._clocks.parts, self._ticks, strict=True)
        return [(part, int(ticks) * tick_s) for part, ticks in parts if ticks]

    def close(self) -> None:
        self._pool.close()
        self._forward.close()

    def _run(
        self, mode: int, split: LoadedSplit, order: np.ndarray, rate: Rate = 0.0, threads: int = 0, into: Any = None
    ) -> Totals:
        """Have threads, those that work now unless a number is given, do one call of the compiled function."""
        working, batch = threads or self._adaptive.size, len(order) if mode == GRADIENTS else self.batch_size
        steps = max(1, -(-len(order) // batch))
        numbers = np.zeros((steps, KEYS + len(self._drawing)), np.float32)
        which = self._step + np.arange(1, steps + 1)
        if mode in (TRAIN, GRADIENTS):
            for at, name in enumerate(self._drawing, KEYS):
                numbers[:, at] = layer_key(self._seed, which, name).astype(np.uint32).view(np.float32)
        if mode in (TRAIN, APPLY):
            numbers[:, 0], (numbers[:, 1], numbers[:, 2]) = rate, self.optimizer.constants(which)
            self._step += steps
        self._totals[...] = 0
        clocks = self._clocks.readings(self._arenas) if self._clocks.on else None
        if clocks is not None:
            clocks[:, 1:] = 0
        began, into = time.perf_counter(), self._gradients if into is None else into
        call = Call(
            0, working, mode, split.bytes_, split.floats, split.nan_mask, split.labels, order, batch,
            self._parameters, self._running, self._slots, into, self._arenas, self._totals,
            self._flags, self._counts, numbers,
        )  # fmt: skip
        self._pool.run(lambda rank: self._work(*call._replace(rank=rank)), working)
        self._calls.check()
        if mode == TRAIN and clocks is not None:
            self._read_clocks(clocks, began)
        loss, hits = self._totals[:, :2].sum(axis=0)
        return Totals(float(loss), int(hits), len(order))

    def _read_clocks(self, clocks: np.ndarray, began_s: float) -> None:
        """Add up what a call of training steps took; a tick's length follows from the first and the last reading."""
        self._ticks += clocks[:, 1:].sum(axis=0)
        ended, shares = int(clocks[0, 0]), len(self._gradients)
        if not self._readings:
            self._readings.append((began_s, ended - int(clocks[::shares, 1:].sum())))
        self._readings[1:] = [(time.perf_counter(), ended)]


class ForwardProgram(Program[np.ndarray]):
    """A `Program` that predicts and does nothing else: the network of `folding`, and no room for a backward pass.

    Args:
        batch_size: images that come at once, as a rule. target, threads: as `SimdProgram`.
    """

    def __init__(
        self, network: Network, loss: Loss, optimizer: Optimizer, batch_size: int, target: Target, threads: int
    ) -> None:
        check_loss(network, loss)
        self.network, self.loss, self.optimizer, self.batch_size = network, loss, optimizer, batch_size
        started = time.perf_counter()
        self._folded = Folded.of(network)
        target = replace(target, forced=(), clocks=False, forward_only=True, parts=threads)
        floats = batch_size * sum(math.prod(stage.output_shape) for stage in network.stages)
        together = 4 * network.parameter_count > target.l2_bytes and network.parameter_count > HEAVY * floats
        plan = make_plan(self._folded.network, target, batch_size if together else -(-batch_size // threads))
        described = self._folded.network, Loss.SOFTMAX_CROSS_ENTROPY, SGD()  # whatever it is trained by
        self._work = _function((*described, target, plan.vectors, plan.least))
        self._rows, self._layout, self._outputs = plan.explain(1), plan.parameters, plan.scores.size
        self._parameters = aligned_zeros((plan.parameters.size + plan.parameters.kept,))
        self._arenas = plan.arena.make(threads)
        self._calls, self._state = Calls(plan.nodes, plan, self._arenas), complete({}, network, SGD())
        self._cycles, self._part_cycles = sum(part.cycles for part in self._rows), target.part_cycles
        self._tile = plan.arena.images
        self._most = threads if any(node.parts > 1 for node in plan.nodes) else 1
        self._threads, self._lock, self._ended = threads, threading.Lock(), 0.0
        self._order, self._job = np.arange(ROWS, dtype=np.int64), (ctypes.c_int64 * (entry.HERE + threads))()
        fixed = np.ctypeslib.as_array(self._job), self._order, self._parameters, self._arenas
        # what a thread that nobody waits for works on stays as long as it does
        self._helpers = Helpers([functools.partial(self._work, rank, *fixed) for rank in range(1, threads)])
        self._run_first = functools.partial(self._work.run, self._work.pack(0, *fixed))
        weakref.finalize(self, self._helpers.close)
        self.compile_s = time.perf_counter() - started

    def load(self, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(images, None if images.dtype == np.uint8 else np.float32)

    def predict(self, handle: np.ndarray) -> np.ndarray:
        return self._scores(handle, False)

    def probabilities(self, handle: np.ndarray) -> np.ndarray:
        if self.loss.is_binary:
            return super().probabilities(handle)
        return self._scores(handle, True)

    def _scores(self, images: np.ndarray, probabilities: bool) -> np.ndarray:
        scores = np.empty((len(images), self._outputs), np.float32)
        for start in range(0, len(images), ROWS):
            self._run(images[start : start + ROWS], scores[start : start + ROWS], probabilities)
        return scores

    def _run(self, images: np.ndarray, scores: np.ndarray, probabilities: bool) -> None:
        """Fill the scores of at most `ROWS` images, which each thread has a part of."""
        count, job = len(images), self._job
        threads = min(self._threads, max(-(-count // self._tile), self._most))
        with self._lock:
            follows = time.perf_counter() - self._ended < SOON_S
            job[entry.COUNT], job[entry.PROBABILITIES], job[entry.TURNS] = count, probabilities, SPINS[not follows]
            job[entry.IMAGES], job[entry.ARE_BYTES] = address_of(images), images.dtype == np.uint8
            job[entry.SCORES] = address_of(scores)
            if count * self._cycles > 2 * (self._part_cycles if follows else WAKING_CYCLES):
                for rank in range(1, threads):
                    if not job[entry.HERE + rank]:
                        job[entry.HERE + rank] = 1
                        self._helpers.wake(rank)
            self._run_first()
            self._ended = time.perf_counter()
        self._calls.check()

    def take(self, state: State) -> None:
        """Predict with the parameters and running averages of a state from now on."""
        folded = self._folded.parameters(state)
        folded[np.abs(folded) < np.finfo(np.float32).tiny] = 0  # a CPU takes a hundred times as long for them
        with self._lock:
            self._layout.pack(folded, self._parameters)
            self._job[entry.COUNT] = 0
            self._run_first()

    def restore(self, state: State) -> None:
        self._state = {name: array.copy() for name, array in complete(state, self.network, SGD()).items()}
        self.take(self._state)

    def state(self) -> State:
        return {name: array.copy() for name, array in self._state.items()}

    def explain(self) -> list[Part]:
        return self._rows

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a program of `Backend.forward_only` predicts and does not train")

    train = gradients = apply = _refuse

    def close(self) -> None:
        self._helpers.close()


_ready: dict[str, Function] = {}
"""What this process has compiled or loaded, by `program_key`."""


def _function(described: compilation.Described) -> Function:
    """Return the compiled function of a program."""
    wanted = compilation.arguments_of(described)
    key = program_key(wanted, described)
    if key not in _ready:
        _ready[key] = load_or_make(
            key,
            lambda payload: Function(MachineCode.of_bytes(payload), list(wanted.values())),
            lambda: compilation.compile_in_subprocess(key, described) or compilation.compile_in_process(key, described),
        )
    return _ready[key]


def _indices(order: np.ndarray, split: LoadedSplit) -> np.ndarray:
    """Return an order as compiled code takes it, which looks no further."""
    order = np.ascontiguousarray(order, np.int64)
    if len(order) and not (order.min() >= 0 and order.max() < len(split)):
        raise IndexError(f"images {order.min()} to {order.max()} asked for, there are {len(split)}")
    return order


_NO_SPLIT = LoadedSplit(np.empty(0, np.uint8), np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0, np.int32))


def paying_threads(network: Network, batch_size: int, target: Target, threads: int) -> int:
    """Return how many of the threads a training step is worth; it follows from shapes, not from the clock.

    Waiting for each other costs about 3 us a step, and a thread without an image helps only where parameters are many.
    """
    macs = 3 * sum(stage.macs for stage in network.stages) * batch_size
    work = int(macs / (2 * target.lanes * SMALL_SHARE))
    if 4 * network.parameter_count <= target.l2_bytes:
        threads = min(threads, batch_size)
    return max(1, min(threads, work // THREAD_CYCLES))


def make_plan(network: Network, target: Target, share: int) -> Plan:
    """Return the plan for `share` images per thread and step.

    A tile is two vectors of images, so that weights are read half as often as with one. It is one vector where the
    share is small, or where two take much memory, or where their activations leave L2 and outweigh the weights or push
    out what one leaves there. It is more where the weights leave L2; of a share of more than eight vectors, where
    activations outweigh the weights, as many as a core's part of L3 holds. It is four images, to predict, where one
    vector leaves L2 by a third and the weights stay in L3. With seams it is half a vector or less where one is twice
    L2: the most that L2 holds between two seams, or the least that costs the kernels little.
    """

    def size(plan: Plan) -> int:
        return plan.arena.size + target.forward_only * (plan.arena.scratch + plan.parameters.kept)

    plan = one = Plan(network, target, 1, share)
    weights = one.parameters.size - one.apart
    if target.forward_only and 3 * size(one) > target.l2_bytes and 4 * weights < LARGEST_ARENA:
        return Plan(network, target, FEWEST_IN_A_TILE / target.lanes, share)
    passes = WEIGHT_PASSES if one.owns else 1
    if one.seams and 2 * size(one) > target.l2_bytes and size(one) > passes * weights:
        smaller = [Plan(network, target, n / target.lanes, share) for n in (8, 4, 2, 1) if n < target.lanes]
        cycles = {p: sum(row.cycles for row in p.explain(1)) for p in smaller if p.arena.images < target.lanes}
        cheap = [p for p in cycles if cycles[p] <= NEAR * min(cycles.values())]
        if cheap:
            return next((p for p in cheap if p.between_seams <= target.l2_bytes), cheap[-1])
    most = MOST_IMAGES if 4 * weights > target.l2_bytes else 2 * target.lanes
    near = 4 * size(one) <= L3_SHARE_BYTES and share > 8 * target.lanes
    worth = 4 * (size(one) + 2 * weights) > target.l2_bytes and size(one) <= WEIGHT_PASSES * weights
    for groups in (2, 4, 8, 16, 32):
        if groups * target.lanes > most or share <= groups // 2 * target.lanes:
            break
        more = Plan(network, target, min(groups, -(-share // target.lanes)), share)
        room = L3_SHARE_BYTES if near and weights < size(plan) else LARGEST_ARENA + 4 * weights
        if (not worth and 4 * size(more) > target.l2_bytes) or 4 * (size(more) + more.arena.scratch) > room:
            break
        plan = more
    return plan
