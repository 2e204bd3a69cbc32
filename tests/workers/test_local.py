import errno
import os
import signal
import time
from multiprocessing import active_children
from unittest.mock import MagicMock

import numpy as np
import pytest
from commands import raises
from tables import each
from workers.work import HUNDRED_STEPS, RATE, compiled, images, on_threads, order, trained

from cnnexp.backends import backend_class
from cnnexp.datasets import Split
from cnnexp.errors import CheckpointError, ConfigError, WorkerDied
from cnnexp.system.cores import usable_cores
from cnnexp.workers import Local, local
from cnnexp.workers.local import SLOT_BYTES
from cnnexp.workers.replica import divide_threads


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 7, SLOT_BYTES // 4 + 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exchanges_give_every_worker_the_same(size, count, dtype):
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal(count).astype(dtype) for _ in range(size)]
    total = parts[0].copy()
    for part in parts[1:]:
        total += part  # in the order of the ranks: the same bits

    def work(collective):
        collective.barrier()
        buffer = parts[collective.rank].copy()
        collective.all_reduce(buffer)
        uneven = parts[collective.rank].astype(np.float32)[: count // (collective.rank + 1)]
        gathered = collective.all_gather(uneven, [count // (rank + 1) for rank in range(size)])
        told = parts[collective.rank].astype(np.float64).reshape(-1, 1)
        collective.broadcast(told)
        return buffer, gathered, told

    for buffer, gathered, told in on_threads(size, work):
        np.testing.assert_array_equal(buffer, total)
        wanted = np.concatenate([part[: count // (rank + 1)] for rank, part in enumerate(parts)])
        np.testing.assert_array_equal(gathered, wanted.astype(np.float32))
        np.testing.assert_array_equal(told, parts[0].astype(np.float64).reshape(-1, 1))


def test_no_worker_overtakes_another():
    """Many small exchanges with workers of changing speed: a slot overwritten too early would give a wrong sum."""

    def work(collective):
        rng = np.random.default_rng(collective.rank)
        for step in range(200):
            if rng.random() < 0.1:
                time.sleep(0.001)
            buffer = np.full(5, step * (collective.rank + 1), np.float32)
            collective.all_reduce(buffer)
            np.testing.assert_array_equal(buffer, step * 6)
        return True

    assert on_threads(3, work) == [True] * 3


# test_replica has all combinations, in threads
@each(("gradients", "one_conv", "adam"), ("hybrid", "two_conv_mlp", "sgd"))
def test_two_processes_train_like_one_for_100_steps(sync, model, optimizer):
    one = trained(compiled(None, model, optimizer), HUNDRED_STEPS)
    program = compiled(Local(count=2, sync=sync), model, optimizer)
    totals, state, scores = trained(program, HUNDRED_STEPS)
    assert program.metrics()["workers/1/images"] == 100 * 8
    program.close()
    program.close()
    assert state["step"] == 100
    assert (totals.correct, totals.count) == (one[0].correct, one[0].count)
    difference = np.linalg.norm(state["parameters"] - one[1]["parameters"])
    assert difference < 1e-5 * np.linalg.norm(one[1]["parameters"])
    np.testing.assert_allclose(scores, one[2], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(usable_cores() < 2, reason="one worker with two threads needs two cores")
@pytest.mark.parametrize("model", ["one_conv", pytest.param("two_conv_mlp", marks=pytest.mark.thorough)])
def test_two_processes_add_up_what_two_threads_add_up(model, monkeypatch):
    """Bit for bit where every worker has the same power of two of images, on one_conv."""
    monkeypatch.setattr("cnnexp.backends.simd.runtime.program.THREAD_CYCLES", 1)  # else it gets one thread
    _, one, _ = trained(compiled(None, model, "adam", "cpu-simd", threads=2), HUNDRED_STEPS)
    program = compiled(Local(count=2), model, "adam", "cpu-simd")
    _, state, _ = trained(program, HUNDRED_STEPS)
    program.close()
    # a thread that owns a wide layer's weights adds up all threads' images in one sum; workers add up a sum each
    rounding = 0.0 if model == "one_conv" else 1e-5
    for name, array in one.items():
        np.testing.assert_allclose(state[name], array, rtol=0, atol=rounding, err_msg=name)


def test_a_killed_worker_is_named_and_the_others_end():
    program = compiled(Local(count=3), "one_conv", "sgd")
    handle = program.load(*images())
    program.train(handle, order(), RATE)
    children = [child.pid for child in sorted(active_children(), key=lambda child: child.name)]
    os.kill(children[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=rf"worker 2 of 3 \(pid {children[1]}\) was killed by SIGKILL"):
        program.train(handle, np.tile(order(), 10_000), RATE)
    program.close()
    assert not any(child.pid in children for child in active_children())


def test_threads_are_divided_among_the_workers_and_what_cannot_be_is_refused(monkeypatch):
    monkeypatch.setattr("cnnexp.workers.replica.usable_cores", lambda: 2)
    backend = backend_class("cpu-parallel")(threads=2)
    assert [divide_threads(backend, workers).threads for workers in (1, 2, 4)] == [2, 1, 1]
    alone = backend_class("numpy")()
    assert divide_threads(alone, 4) is alone
    raises(ConfigError, r"workers\.period=3: only with workers\.sync=parameters, not gradients", Local, period=3)
    raises(ConfigError, r"trainer\.batch_size=16: must be >= 17", compiled, Local(count=17), "one_conv", "sgd")
    assert type(compiled(Local(count=1), "one_conv", "sgd")) is type(compiled(None, "one_conv", "sgd"))


@pytest.mark.parametrize("lacking", [errno.EAGAIN, errno.EPIPE])
def test_a_worker_that_cannot_be_started_is_told_in_a_line(monkeypatch, lacking):
    monkeypatch.setattr(local._CONTEXT, "Process", MagicMock(side_effect=OSError(lacking, os.strerror(lacking))))
    with pytest.raises(WorkerDied, match=r"workers\.count=2: not all of them can be started: .*; lower workers\.count"):
        compiled(Local(count=2), "one_conv", "sgd")
    assert not active_children()


def test_the_constants_of_the_cost_model_are_measured_and_a_wrong_state_leaves_the_workers_together():
    program = compiled(Local(sync="parameters"), "one_conv", "adam")
    raises(CheckpointError, r"\(3,\), the network needs", program.restore, {"parameters": np.zeros(3, np.float32)})
    prediction = program.measure(Split(*images()))
    assert min(prediction.costs.t_c, prediction.epoch_s) > 0
    assert min(prediction.costs.t_b, prediction.costs.t_s) >= 0  # 0 where a busy machine held up the short exchange
    assert (prediction.training.averages, prediction.training.floats) == (1, 3 * program.network.parameter_count)
    assert trained(program)[0].count == len(order())
    program.close()
