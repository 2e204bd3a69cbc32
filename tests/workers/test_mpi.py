import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT, TINY, cnnexp, statuses, wait_for
from tables import each
from workers.work import HUNDRED_STEPS, LIMIT_S, MODELS, OPTIMIZERS, compiled, trained

from cnnexp.backends.processor import usable_cores
from cnnexp.tracking.events import read_journal
from cnnexp.training.checkpoint import find, list_checkpoints, load

psutil = pytest.importorskip("psutil", reason="finds the ranks to kill")
pytest.importorskip("mpi4py", reason="workers=mpi needs mpi4py: pip install cnnexp[mpi]")
MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
pytestmark = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install cnnexp[mpi]")
PATH = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
FFN = ("model=ffn", "~model.filters", "model.loss_name=softmax_cross_entropy")


def start(*arguments):
    command = [MPIEXEC, "-n", "2", sys.executable, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **PATH}, **pipes)


def finish(process, seconds=LIMIT_S):
    try:
        return process.communicate(timeout=seconds)
    finally:
        process.kill()


def ranks_of(process):
    found = [p for p in psutil.Process(process.pid).children(recursive=True) if "PMI_RANK" in p.environ()]
    helpers = ("guard.py", "cnnexp.tracking.store")  # of rank 0, with its environment
    return {int(p.environ()["PMI_RANK"]): p for p in found if not any(h in " ".join(p.cmdline()) for h in helpers)}


def test_two_ranks_train_like_one_for_100_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("cnnexp.backends.simd.runtime.program.THREAD_CYCLES", 1)  # two threads, however small
    ways = [("gradients", "numpy"), ("hybrid", "numpy"), *([("gradients", "cpu-simd")] * (usable_cores() > 1))]
    cases = [[sync, model, rule, backend] for sync, backend in ways for model in MODELS for rule in OPTIMIZERS]
    process = start("tests/workers/work.py", str(tmp_path), json.dumps(cases))
    assert finish(process, 2 * LIMIT_S) == ("", "")
    assert process.returncode == 0
    for sync, model, optimizer, backend in cases:
        threads = {"threads": 2} if backend == "cpu-simd" else {}
        totals, state, scores = trained(compiled(None, model, optimizer, backend, **threads), HUNDRED_STEPS)
        with np.load(tmp_path / f"{sync}-{model}-{optimizer}-{backend}.npz") as found:
            assert found["step"] == 100
            if threads and model == "one_conv":  # bit for bit: see `test_two_processes_add_up_what_two_threads_add_up`
                np.testing.assert_array_equal(found["parameters"], state["parameters"])
            assert float(found["loss"]) == pytest.approx(totals.loss, rel=1e-5)
            np.testing.assert_allclose(found["scores"], scores, rtol=1e-4, atol=1e-5)
            difference = np.linalg.norm(found["parameters"] - state["parameters"])
            assert difference < 1e-5 * np.linalg.norm(state["parameters"])


@each(
    ("0", "worker 1 of 2 could not compile: no such device"),
    pytest.param("1", "no such device", marks=pytest.mark.thorough),
)
def test_a_rank_that_cannot_compile_says_why_and_all_go_on(tmp_path, monkeypatch, fitted, said):
    monkeypatch.setenv("FITTED", fitted)
    process = start("tests/workers/work.py", str(tmp_path), json.dumps([["gradients", "one_conv", "sgd", "numpy"]]))
    assert finish(process) == (f"{said}\n", "")
    assert process.returncode == 0
    assert (tmp_path / "gradients-one_conv-sgd-numpy.npz").exists()


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_killed_rank_ends_all_and_is_named(rank):
    process = start("tests/workers/work.py")
    assert process.stdout.readline() == "training\n"
    everyone = ranks_of(process)
    assert sorted(everyone) == [0, 1]
    everyone[rank].send_signal(signal.SIGKILL)
    _, stderr = finish(process)
    assert process.returncode != 0
    assert re.search(rf"cnnexp: error: worker {rank} of 2 \(pid {everyone[rank].pid} on \S+\) died", stderr)
    assert psutil.wait_procs(everyone.values(), timeout=LIMIT_S)[1] == []


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_stopped_rank_ends_all_and_the_run_is_failed(tmp_path, rank, new_store):
    store, folder = new_store(tmp_path), tmp_path / "run"
    endless = (f"hydra.run.dir={folder}", "trainer.epochs=100000", "dataset.train_size=1000")
    recorded = ("tracking=mlflow", f"tracking.uri={store}")
    process = start("-m", "cnnexp", *TINY, *endless, *recorded, "workers=mpi", "workers.heartbeat_timeout_s=4")
    wait_for(lambda: list_checkpoints(folder / "checkpoints")[1:], process)
    everyone = ranks_of(process)
    everyone[rank].suspend()
    _, stderr = finish(process)
    assert process.returncode != 0
    said = rf"worker {rank} of 2 \(pid {everyone[rank].pid} on \S+\) has given no sign of life for 4 s"
    assert re.findall(r"cnnexp: error: .*", stderr) == [re.search(f"cnnexp: error: {said} .*", stderr)[0]]
    assert psutil.wait_procs(everyone.values(), timeout=LIMIT_S)[1] == []
    wait_for(lambda: statuses(store) == ["FAILED"])
    assert load(find(folder)).epoch >= 1


RARE = (
    ((), 2, "workers=none: but 2 MPI processes were started; add workers=mpi"),
    (("workers=local",), 2, "workers=local: but 2 MPI processes were started; add workers=mpi"),
    (("workers=mpi", "workers.sync=hybrid", *FFN), 2, "workers.sync=hybrid: needs convolutions"),
)


@each(
    (("workers=mpi",), 0, ""),
    (("trainer.epoch=3",), 2, "trainer.epoch=3: unknown key"),
    *(pytest.param(*case, marks=pytest.mark.thorough) for case in RARE),
)
def test_rank_0_alone_speaks_and_all_end(tmp_path, arguments, code, message):
    process = start("-m", "cnnexp", *TINY, *arguments, f"hydra.run.dir={tmp_path}/run")
    stdout, stderr = finish(process)
    assert process.returncode == code
    assert stdout.count("200 images to train on") == (code == 0)
    assert message in stderr
    assert stderr.count("\n") == (code != 0)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["run"])


def test_ctrl_c_ends_all_ranks_and_the_run_is_killed(tmp_path):
    folders = (f"hydra.run.dir={tmp_path}", "trainer.epochs=100000", "dataset.train_size=1000")
    process = start("-m", "cnnexp", *TINY, *folders, "workers=mpi")
    wait_for(lambda: list_checkpoints(tmp_path / "checkpoints"), process)
    everyone = ranks_of(process)
    process.send_signal(signal.SIGINT)
    _, stderr = finish(process)
    assert process.returncode != 0
    assert "cnnexp: error: interrupted; its checkpoint is " in stderr
    assert read_journal(tmp_path)["status"] == "KILLED"
    assert psutil.wait_procs(everyone.values(), timeout=LIMIT_S)[1] == []


def test_workers_mpi_without_mpiexec_says_how():
    done = cnnexp(*TINY, "workers=mpi")
    assert done.returncode == 2
    assert "workers=mpi: not started by MPI; run it as mpiexec -n 4" in done.stderr
