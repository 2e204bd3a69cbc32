"""The compiled training loop of one thread: tiles of images through the kernels, a barrier, the optimizer, a barrier.

All threads run the same function over the same batches at once. A batch has fixed shares: of each, the gradient is
summed in a buffer of its own; after a wait for the others, a share of the parameters is updated by the gradients of all
shares, added in their order. So the result depends on the number of shares alone, not on who came first, nor on how
many threads do them: a thread each, or one thread all in turn. Where a batch is one image, all do parts of its kernels.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import int64, types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.np.numpy_support import from_dtype

from cnnexp.backends.cache import host
from cnnexp.backends.simd.algorithms import update
from cnnexp.backends.simd.compiler.compose import compose, emitted
from cnnexp.backends.simd.compiler.emit import Kernel
from cnnexp.backends.simd.compiler.entry import APPLY, GRADIENTS, TRAIN, Call, Forward, arguments
from cnnexp.backends.simd.compiler.host import host_target
from cnnexp.backends.simd.compiler.intrinsics import LOAD_CONTROL, STORE_CONTROL, call
from cnnexp.backends.simd.compiler.native import MachineCode, add_packed
from cnnexp.backends.simd.lowering import Plan
from cnnexp.backends.simd.runtime.barrier import wait
from cnnexp.backends.simd.runtime.forward import compiler, gathers, make_forward, softmax
from cnnexp.backends.simd.runtime.seams import clocking, make_batch
from cnnexp.network.losses import Loss
from cnnexp.optimizers import Optimizer

FLUSH_TO_ZERO = 0x8040
"""Bits of x86's MXCSR: results below the normal numbers become 0, and so do operands."""


def _emit_flush(builder: ir.IRBuilder) -> None:
    target = host_target()
    if target.has(LOAD_CONTROL):
        register = cgutils.alloca_once(builder, ir.IntType(32))
        place = builder.bitcast(register, ir.IntType(8).as_pointer())
        call(builder, target.features, STORE_CONTROL, ir.VoidType(), [place])
        builder.store(builder.or_(builder.load(register), ir.IntType(32)(FLUSH_TO_ZERO)), register)
        call(builder, target.features, LOAD_CONTROL, ir.VoidType(), [place])


_flush_denormals = emitted(types.void, _emit_flush)
"""Have this thread, which does nothing else, take numbers below 1e-38 for 0: they are a hundred times as slow. Momenta
of units that stopped learning halve for thousands of steps and get there."""


def make_work(plan: Plan, loss: Loss, optimizer: Optimizer, key: str, library: ir.Module) -> Dispatcher:
    """Return `work`, a dispatcher that is not compiled yet.

    Args:
        key: what distinguishes its machine code from that of other programs. library: of the kernels, see `compose`.
    """
    compiled = compiler(key)
    run_batch = _make_batch(plan, loss, compiled, library)
    update_share = _make_update(plan, optimizer, compiled, library)
    start_clocks, charge_wait = (clocking(plan, name) for name in ("start", "wait"))

    def work(call: Call) -> None:
        """Do one thread's part."""
        _flush_denormals()
        shares, count = call.gradients.shape[0], len(call.order)
        mine, next_ = shares * call.rank // call.threads, shares * (call.rank + 1) // call.threads
        call.counts[call.rank, 1] = shares
        for share in range(mine, next_):
            start_clocks(call.arenas[share])
        for step in range(max(1, -(-count // call.batch))):
            # the thread's shares of the batch, tile by tile
            first, last = step * call.batch, min((step + 1) * call.batch, count)
            here = last - first
            if call.mode != APPLY:
                run_batch(call, step, first, here, mine, next_)
            if call.mode in (TRAIN, APPLY):
                # its shares of the parameters, between two waits for the others
                wait(call.flags, call.rank, call.threads)
                for share in range(mine, next_):
                    update_share(call, share, step, here)
                wait(call.flags, call.rank, call.threads)
                for share in range(mine, next_):
                    charge_wait(call.arenas[share])

    return compiled(work)


def _make_batch(plan: Plan, loss: Loss, compiled: Callable, library: ir.Module) -> Callable:
    """Return what takes a thread's shares of a batch through the layers, tile by tile; see `make_batch` for seams."""
    target, images = plan.target, plan.arena.images
    gather_bytes, gather_floats = gathers(plan, library)
    draw = compose("draws", target, [], library, plan.draws)
    forward = compose("forward", target, plan.forward, library)
    backward = compose("backward", target, plan.backward, library)
    owned_gradients = compose("owned_gradients", target, plan.gradients, library)
    charge_gather, charge_loss = (clocking(plan, name) for name in ("gather", "loss"))
    tile_loss = _tile_loss(loss, plan, compiled, library)

    def begin(call: Call, arena: np.ndarray, step: int, tile: np.ndarray) -> None:
        draw(call.numbers[step], tile, arena, len(tile), 0)
        if len(call.bytes_):
            gather_bytes(call.bytes_, tile, arena, len(tile))
        else:
            gather_floats(call.floats, tile, arena, len(tile))
        charge_gather(arena)

    def finish(call: Call, arena: np.ndarray, share: int, tile: np.ndarray, batch: int) -> None:
        tile_loss(arena, call.nan_mask, call.labels, tile, batch, call.totals[share])
        charge_loss(arena)

    begin, finish = compiled(begin, inline="always"), compiled(finish, inline="always")
    if plan.seams:
        return make_batch(plan, begin, draw, finish, compiled, library)

    def run_tile(call: Call, share: int, step: int, at: int, end: int, batch: int) -> None:
        """Run the images order[at : end], at most a tile's, of a batch of so many."""
        arena, gradient, tile = call.arenas[share], call.gradients[share], call.order[at:end]
        begin(call, arena, step, tile)
        forward(call.parameters, gradient, arena, len(tile))
        finish(call, arena, share, tile, batch)
        backward(call.parameters, gradient, arena, len(tile))
        if call.mode == GRADIENTS:
            owned_gradients(call.parameters, gradient, arena, len(tile))

    # outlined, LLVM knows less of the kernels' arguments: 5 % slower
    run_tile = compiled(run_tile, inline="always")

    def run_batch(call: Call, step: int, first: int, here: int, mine: int, next_: int) -> None:
        """Run the shares from `mine` to `next_` of the batch order[first : first + here]."""
        shares = call.gradients.shape[0]
        for share in range(mine, next_):
            start, end = first + here * share // shares, first + here * (share + 1) // shares
            for at in range(start, end, images):
                run_tile(call, share, step, at, min(at + images, end), here)

    run_batch = compiled(run_batch, inline="always")
    return _shared(plan, run_batch, begin, finish, compiled, library) if plan.target.parts > 1 else run_batch


def _shared(
    plan: Plan, several: Callable, begin: Callable, finish: Callable, compiled: Callable, library: ir.Module
) -> Callable:
    """Return what runs `several` images, or one: the last share's, whose large kernels all threads do parts of."""
    every, back = plan.forward + plan.backward, len(plan.forward)
    run = compose("part", plan.target, [], library, [[kernel] for kernel in every], in_parts=True)
    owned_gradients = compose("owned_gradients", plan.target, plan.gradients, library)
    parts = np.array([kernel.parts if isinstance(kernel, Kernel) else 1 for _, kernel in every])

    def run_batch(call: Call, step: int, first: int, here: int, mine: int, next_: int) -> None:
        if here != 1:
            several(call, step, first, here, mine, next_)
            return
        last, share = next_ == call.gradients.shape[0], call.gradients.shape[0] - 1
        arena, gradient, tile = call.arenas[share], call.gradients[share], call.order[first : first + here]
        if last:
            begin(call, arena, step, tile)
        for kernel in range(len(parts)):
            if parts[kernel - 1] > 1:
                wait(call.flags, call.rank, call.threads)
            if last and kernel == back:
                finish(call, arena, share, tile, here)
            if parts[kernel] > 1:
                wait(call.flags, call.rank, call.threads)
                for part in range(mine, next_):
                    run(call.parameters, gradient, arena, here, part, kernel)
            elif last:
                run(call.parameters, gradient, arena, here, 0, kernel)
        if call.mode == GRADIENTS:
            wait(call.flags, call.rank, call.threads)
            if last:
                owned_gradients(call.parameters, gradient, arena, here)

    return compiled(run_batch, inline="always")


def _make_update(plan: Plan, optimizer: Optimizer, compiled: Callable, library: ir.Module) -> Callable:
    """Return what takes the optimizer's step of a share of the parameters.

    It adds up the shares' gradients in order, applies the rule and clears them: parameter by parameter where weight
    decay spares those of one axis, else at once.
    """

    def rule(decay: float) -> Callable:
        emit = functools.partial(update.update, optimizer=dataclasses.replace(optimizer, weight_decay=decay))
        return compose(f"update_{decay:g}", plan.target, [("update", emit)], library)

    added, whole = plan.parameters.added, np.array([[0, plan.parameters.size, 0]])
    add = compose("add", plan.target, [("add", update.add)], library)
    decaying = rule(optimizer.weight_decay)
    sparing, rows = (decaying, whole) if optimizer.decay_biases else (rule(0.0), plan.parameters.rows())
    owned_updates = compose("owned_updates", plan.target, plan.updates(optimizer), library)
    charge_wait, charge_update = (clocking(plan, name) for name in ("wait", "update"))

    def update_share(call: Call, share: int, step: int, batch: int) -> None:
        """Take step number `step` of this call, on a batch of so many images."""
        arena, shares, numbers = call.arenas[share], call.gradients.shape[0], call.numbers[step]
        charge_wait(arena)
        # those whose gradients are added up by share, in whole cache lines
        size = added if call.mode == TRAIN else len(call.parameters)
        low = size * share // shares // 16 * 16
        high = size if share == shares - 1 else size * (share + 1) // shares // 16 * 16
        least = (shares - 1) // batch if batch else 0  # the first share that has images, or a gradient that is given
        total = call.gradients[least]
        for other in range(least + 1, shares):
            if batch * (other + 1) // shares > batch * other // shares:
                add(total[low:high], call.gradients[other, low:high], numbers, high - low)
        for i in range(len(rows)):
            first, end = max(low, rows[i, 0]), min(high, rows[i, 1])
            w, g = call.parameters[first:end], total[first:end]
            s0, s1 = call.slots[0, first:end], call.slots[1, first:end]
            if first < end and rows[i, 2] == 1:
                sparing(w, g, s0, s1, numbers, end - first)
            elif first < end:
                decaying(w, g, s0, s1, numbers, end - first)
        charge_update(arena)
        # those that a thread owns
        if call.mode == TRAIN:
            known = call.counts[call.rank]
            known[0] = share
            for other in range(shares):
                known[2 + other] = batch * (other + 1) // shares - batch * other // shares
            owned_updates(call.parameters, call.slots[0], call.slots[1], numbers, call.arenas, known, 0)

    return compiled(update_share, inline="always")  # see `_make_batch`


def machine_code(plan: Plan, loss: Loss, optimizer: Optimizer, key: str) -> MachineCode:
    """Compile `work`, see `make_work`.

    Raises:
        RuntimeError: Numba compiles for another CPU than the plan was made for.
    """
    codegen = cpu_target.target_context.codegen()
    if (found := codegen.magic_tuple()) != host():
        raise RuntimeError(f"Numba compiles for {found}, the kernels are for {host()}; NUMBA_CPU_NAME sets both")
    library = ir.Module("kernels")
    library.triple, library.data_layout = host()[0], str(codegen.target_data)
    forward_only = plan.target.forward_only
    work = make_forward(plan, key, library) if forward_only else make_work(plan, loss, optimizer, key, library)
    call = Forward if forward_only else Call
    kinds = [
        types.Array(from_dtype(np.dtype(a.kind)), a.dimensions, "C", readonly=not a.written) if a else int64
        for a in arguments(call).values()
    ]
    signature = types.void(types.NamedTuple(kinds, call))
    work.compile(signature)
    compiled = work.overloads[signature.args]
    _, _, bitcode = compiled.library.serialize_using_bitcode()
    add_packed(library, compiled.fndesc.llvm_func_name, list(arguments(call).values()))
    return MachineCode.linked(bitcode, str(library))


def _tile_loss(loss: Loss, plan: Plan, compiled: Callable, library: ir.Module) -> Callable:
    """Return the loss of a tile, image by image, whose softmax is begun in vectors."""
    scores, d_scores = plan.scores, plan.d_scores
    outputs, stride, scores_at, d_scores_at = scores.size, scores.stride, int(scores.offset), int(d_scores.offset)
    one, rule = np.float32(1), compiled(loss.rule(outputs, None, math.log, math.log1p))
    powers = "powers", functools.partial(softmax, scores=scores, to=d_scores, normalized=False)
    begin = compose("loss", plan.target, [powers] if loss.name == "softmax_cross_entropy" else [], library)

    @compiled
    def tile_loss(
        arena: np.ndarray, nan_mask: np.ndarray, labels: np.ndarray, order: np.ndarray, batch: int, totals: np.ndarray
    ) -> None:
        begin(arena, arena, arena, len(order))
        scale = one / np.float32(batch)
        for n in range(len(order)):
            s = arena[scores_at + n * stride : scores_at + n * stride + outputs]
            d = arena[d_scores_at + n * stride : d_scores_at + n * stride + outputs]
            image = order[n]
            value, hit = rule(s, labels[image], scale + nan_mask[image], d)
            totals[0] += value + nan_mask[image]
            totals[1] += hit

    return tile_loss
