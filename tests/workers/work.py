"""What the workers of these tests train, in threads too; run by `mpiexec`, what every rank does."""

import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from cnnexp import SGD, Adam, Loss, OneConv, TwoConvMlp
from cnnexp.backends import backend_class
from cnnexp.errors import BackendUnavailable, CnnexpError
from cnnexp.measuring.environment import launched_rank
from cnnexp.training.loop import epoch_order
from cnnexp.workers import Mpi, mpi
from cnnexp.workers.local import LocalCollective, SharedBuffer

MODELS = {"one_conv": OneConv(filters=4), "two_conv_mlp": TwoConvMlp(filters=3, hidden=17)}
OPTIMIZERS = {"sgd": SGD(lr=0.05, momentum=0.5), "adam": Adam(lr=1e-3)}
RATE = 0.01
# a loss that is seen by then was not waited for; a busy machine is slow, not that slow
LIMIT_S = Mpi().heartbeat_timeout_s / 2


def images(count=50, side=12):
    rng = np.random.default_rng(1)
    return rng.random((count, side, side, 1), np.float32), rng.integers(0, 10, count).astype(np.int32)


def order(epochs=5):
    return np.concatenate([epoch_order(50, 0, epoch) for epoch in range(epochs)])


HUNDRED_STEPS = order(32)  # what 100 steps of 16 images visit


def compiled(workers, model, optimizer, backend="numpy", batch_size=16, **options):
    network = MODELS[model].network((12, 12, 1), 10)
    parts = (network, Loss.SOFTMAX_CROSS_ENTROPY, OPTIMIZERS[optimizer], batch_size)
    backend = backend_class(backend)(**options)
    program = backend.compile(*parts) if workers is None else workers.compile(backend, *parts)
    program.restore({"parameters": network.initial_parameters(0)})
    return program


def trained(program, visited=None):
    """Return the totals, the state and the scores after training on the images `visited`."""
    handle = program.load(*images())
    totals = program.train(handle, order() if visited is None else visited, RATE)
    return totals, program.state(), program.predict(handle)


def on_threads(size, work):
    """Return what `work(collective)` returns on each rank; threads share the buffer as processes do."""
    shared, failed = SharedBuffer(size), threading.Event()

    def check():
        if failed.is_set():
            raise threading.BrokenBarrierError

    def guarded(rank):
        try:
            return work(LocalCollective(shared, rank, check))
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(size)]
    # what went wrong on a rank comes before what the others say of it
    futures.sort(key=lambda future: isinstance(future.exception(), threading.BrokenBarrierError))
    return [future.result() for future in futures]


class OnOneRank(backend_class("numpy")):
    """A backend that only the rank FITTED can compile for."""

    def compile(self, *parts):
        if launched_rank() != int(os.environ["FITTED"]):
            raise BackendUnavailable("no such device")
        return super().compile(*parts)


def main(folder=None, cases="[]"):
    """`mpiexec -n 2 python work.py FOLDER CASES`: train every case and save what comes of it; without, until killed."""
    if launched_rank():
        mpi.follow()
        return
    mpi.lead()
    if "FITTED" in os.environ:
        network = MODELS["one_conv"].network((12, 12, 1), 10)
        try:
            Mpi().compile(OnOneRank(), network, Loss.SOFTMAX_CROSS_ENTROPY, OPTIMIZERS["sgd"], 16)
        except CnnexpError as error:
            print(error)  # noqa: T201
    for sync, model, optimizer, backend in json.loads(cases):
        program = compiled(Mpi(sync=sync), model, optimizer, backend)
        totals, state, scores = trained(program, HUNDRED_STEPS)
        program.close()
        path = f"{folder}/{sync}-{model}-{optimizer}-{backend}.npz"
        np.savez(path, loss=totals.loss, scores=scores, **state)
    if folder is None:
        program = compiled(Mpi(), "one_conv", "sgd")
        handle = program.load(*images())
        program.train(handle, order(), RATE)
        print("training", flush=True)  # noqa: T201
        while True:
            program.train(handle, order(), RATE)


if __name__ == "__main__":
    main(*sys.argv[1:])
