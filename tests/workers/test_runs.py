import contextlib
import re
import signal
import subprocess
import time

import pytest
from commands import cnnexp, starting, statuses, wait_for
from conformance import assert_same_state
from tables import each
from workers.work import LIMIT_S

from cnnexp.tracking.events import read_journal
from cnnexp.training.checkpoint import find, list_checkpoints, load

psutil = pytest.importorskip("psutil", reason="finds the workers to kill")
# epochs that take longer than to record one, so that the recorder of a killed run is soon done
LONGER = ("dataset.train_size=1000", "model.filters=32")
PLAIN = ("backend=numpy", "trainer.baseline=null", "trainer.schedule=constant", "optimizer=adam")
SMALL = ("experiment=smoke", *PLAIN)
LAYERS = "[{type: Conv2d, filters: 6, padding: same},{type: BatchNorm2d},{type: ReLU},{type: Dropout, rate: 0.2},"
LAYERS += "{type: Flatten},{type: Linear, features: 10}]"
SILENT = "has given no sign of life for 3 s (workers.heartbeat_timeout_s)"


@pytest.mark.parametrize("workers", ["none", pytest.param("local", marks=pytest.mark.thorough)])
def test_a_run_that_was_stopped_ends_bit_identical_to_one_that_was_not(run, tmp_path, workers):
    """Two epochs, and in another process two more, beside four at once; all that a layer keeps is in the state."""
    data = ("dataset.train_size=300", "dataset.test_size=50", "trainer.batch_size=50", "tracking=none")
    words = (*PLAIN, *data, "model=custom", f"model.layers={LAYERS}", f"workers={workers}")
    assert run(*words, "trainer.epochs=2", f"hydra.run.dir={tmp_path}/half")[::2] == (0, "")
    rest = cnnexp(*words, "trainer.epochs=4", f"hydra.run.dir={tmp_path}/rest", f"trainer.resume={tmp_path}/half")
    assert (rest.returncode, rest.stderr) == (0, "")
    assert run(*words, "trainer.epochs=4", f"hydra.run.dir={tmp_path}/whole")[::2] == (0, "")
    assert_same_state(*(load(find(tmp_path / name)).state for name in ("rest", "whole")))
    losses = [[epoch["train/loss"] for epoch in read_journal(tmp_path / name)["epochs"]] for name in ("whole", "rest")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    start = load(list_checkpoints(tmp_path / "half" / "checkpoints")[0])
    if start.epoch == 0:  # measuring before the first step leaves the averages where a run begins
        assert set(start.state["running"]) == {0.0, 1.0}


def test_a_run_that_cannot_go_on_says_why(run, mistake, tmp_path):
    words = (*SMALL, "tracking=none", "trainer.epochs=2")
    assert run(*words, f"hydra.run.dir={tmp_path}/half")[0] == 0
    for arguments, code, message in (
        (["trainer.epochs=1"], 2, r"trainer.epochs=1: \S+ has done 2 already; give as many"),
        (["trainer.epochs=3", "optimizer.lr=0.5"], 6, 'of another training: optimizer is .*"lr": 0.5'),
        (["trainer.epochs=3", "trainer.resume=nowhere"], 6, "trainer.resume='nowhere': no such file or folder"),
    ):
        mistake(*words, f"trainer.resume={tmp_path}/half", *arguments, says=f".*{message}.*", code=code)
        assert not (tmp_path / "run" / "checkpoints").exists()


@each(("kill", "died"), pytest.param("suspend", SILENT, marks=pytest.mark.thorough))
def test_a_lost_rank_0_ends_the_run_as_failed_and_it_goes_on_from_its_checkpoint(run, tmp_path, new_store, end, said):
    store, folder = new_store(tmp_path), tmp_path / "run"
    with _endless(folder, "workers.heartbeat_timeout_s=3", f"tracking.uri={store}") as (started, worker):
        getattr(psutil.Process(started.pid), end)()
        _, stderr = started.communicate(timeout=LIMIT_S)
        assert started.returncode == -signal.SIGKILL
        assert stderr == f"cnnexp: error: worker 0 of 2 (pid {started.pid}) {said}; the run has ended\n"
        wait_for(lambda: statuses(store) == ["FAILED"])
        wait_for(lambda: _ended(worker))

    epoch = load(find(folder)).epoch + 1
    on = (*LONGER, "tracking=none", f"trainer.resume={folder}", f"trainer.epochs={epoch}")
    assert run(*SMALL, *on, f"hydra.run.dir={tmp_path}/on")[::2] == (0, "")
    assert len(read_journal(tmp_path / "on")["epochs"]) == epoch


@each(("kill", "was killed by SIGKILL"), pytest.param("suspend", SILENT, marks=pytest.mark.thorough))
def test_a_lost_worker_ends_the_run_as_failed(tmp_path, end, said):
    with _endless(tmp_path, "workers.heartbeat_timeout_s=3", "tracking=none") as (run, worker):
        getattr(worker, end)()
        _, stderr = run.communicate(timeout=LIMIT_S)
        assert (run.returncode, stderr) == (8, f"cnnexp: error: worker 1 of 2 (pid {worker.pid}) {said}\n")
        assert read_journal(tmp_path)["status"] == "FAILED"
        assert load(find(tmp_path)).epoch >= 1
        wait_for(lambda: _ended(worker))


@pytest.mark.thorough
def test_a_run_that_is_stopped_as_a_whole_goes_on(tmp_path):
    with _endless(tmp_path, "workers.heartbeat_timeout_s=2", "tracking=none") as (run, worker):
        everyone = [psutil.Process(run.pid), worker]
        for process in everyone:
            process.suspend()
        time.sleep(5)  # longer than the timeout
        checkpoints = tmp_path / "checkpoints"
        before = list_checkpoints(checkpoints)[-1]
        for process in reversed(everyone):
            process.resume()
        wait_for(lambda: list_checkpoints(checkpoints)[-1] > before, run)


def test_a_terminated_run_takes_its_workers_along(tmp_path):
    with _endless(tmp_path, "tracking=none") as (run, worker):
        run.terminate()
        _, stderr = run.communicate(timeout=LIMIT_S)
        assert run.returncode == 143
        assert re.fullmatch("cnnexp: error: terminated; its checkpoint is .*\n", stderr)
        assert read_journal(tmp_path)["status"] == "KILLED"
        wait_for(lambda: _ended(worker))


@contextlib.contextmanager
def _endless(folder, *arguments):
    """Start a run of two workers, wait for its first checkpoint; yield it and its other worker."""
    folders = (f"hydra.run.dir={folder}", "trainer.epochs=100000", *LONGER)
    with starting(*SMALL, "workers=local", *folders, *arguments, stdout=subprocess.DEVNULL) as run:
        try:
            wait_for(lambda: list_checkpoints(folder / "checkpoints")[1:], run)  # of the start, and of an epoch
            (worker,) = [child for child in psutil.Process(run.pid).children() if _is_worker(child)]
            yield run, worker
        finally:
            run.kill()


def _is_worker(process):
    with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has done its work
        return "spawn_main" in " ".join(process.cmdline())
    return False


def _ended(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True
