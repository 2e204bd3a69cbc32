"""Whole runs on the software GPU: what a user is told of one that is too old, full or lost; resume; workers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, python

pytest.importorskip("numba_cuda", reason="runs numba-cuda: pip install cnnexp[gpu]")

import softgpu
from softgpu import SoftGpu

pytestmark = pytest.mark.skipif(bool(softgpu.unavailable()), reason=softgpu.unavailable())
# a linear classifier: few kernels to compile
SETTINGS = (
    *("backend=gpu-naive", "model=ffn", "model.hidden=[]", "model.loss_name=softmax_cross_entropy", "tracking=none"),
    *("dataset=synthetic", "dataset.height=2", "dataset.width=2", "dataset.train_size=4", "dataset.test_size=2"),
    *("trainer.batch_size=2", "trainer.epochs=4", "trainer.baseline=null"),
)


def train(gpu: SoftGpu, folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """Train on a GPU; return how it ended, and the lines of the run's journal."""
    command = [sys.executable, "-m", "cnnexp", *SETTINGS, f"hydra.run.dir={folder}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=gpu.environment(), capture_output=True, text=True)
    return done, [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


SCRIPT = """
import numpy as np
from cnnexp import SGD, Linear, Loss, Network
from cnnexp.backends import backend_class
from cnnexp.errors import GpuError

try:
    program = backend_class("gpu-naive")().compile(Network((4,), (Linear(2),)), Loss.SOFTMAX_CROSS_ENTROPY, SGD(), 2)
    program.train(program.load(np.zeros((4, 4), np.float32), np.zeros(4, int)), np.arange(4), 0.1)
except GpuError as error:
    print(error)
"""
UNFIT = (
    (SoftGpu(driver=(12, 8)), r"the NVIDIA driver takes CUDA 12\.8, the compiler here is of CUDA 13\.\d+: update"),
    (SoftGpu(capability=(7, 0)), r"backend\.device=0: .* has compute capability 7\.0, the compiler here is for 7\.5"),
)
FULL = SoftGpu(fault="alloc:5"), r"the GPU is out of memory; lower trainer\.batch_size"


@pytest.mark.parametrize(("gpu", "says"), [FULL, *(pytest.param(*one, marks=pytest.mark.thorough) for one in UNFIT)])
def test_a_gpu_that_gives_up_is_one_line(gpu, says):
    told = python("-c", SCRIPT, env=gpu.environment())
    assert re.fullmatch(rf"{says}[^\n]*\n", told), told


def test_a_lost_gpu_is_one_line_and_a_failed_run_that_goes_on_elsewhere(tmp_path):
    done, journal = train(SoftGpu(fault="lost:110"), tmp_path / "run")
    says = r"the GPU failed \(CUDA_ERROR_UNKNOWN\) and computes no more for this process"
    assert done.returncode == 1
    assert re.fullmatch(rf"cnnexp: error: {says}[^\n]*\n", done.stderr), done.stderr
    assert "ERROR" not in done.stdout
    assert (journal[-1]["event"], journal[-1]["status"]) == ("finish", "FAILED")
    assert re.match(says, journal[-1]["tags"]["error"])
    epochs = [line for line in journal if line["event"] == "epoch"]
    assert 1 <= len(epochs) < 4
    assert f"{len(epochs)}/4" in done.stdout
    again, journal = train(SoftGpu(), tmp_path / "again", f"trainer.resume={tmp_path / 'run'}")
    assert again.returncode == 0, again.stderr
    assert [line["epoch"] for line in journal if line["event"] == "epoch"][-1] == 4
    assert journal[-1]["status"] == "FINISHED"


@pytest.mark.thorough
def test_two_workers_train_on_two_gpus_what_one_trains_on_one(tmp_path):
    report, found = tmp_path / "findings", []
    for count in (1, 2):
        gpu = SoftGpu(devices=count, report=report)
        done, journal = train(gpu, tmp_path / str(count), "workers=local", f"workers.count={count}", "trainer.epochs=2")
        assert done.returncode == 0, done.stderr
        found.append([line["metrics"]["train/loss"] for line in journal if line["event"] == "epoch"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert not report.exists() or report.read_text() == ""


@pytest.mark.thorough
def test_a_fused_step_is_explained(tmp_path):
    """By a clock that counts instructions: the parts are there, the limits are the GPU's, its times mean nothing."""
    gpu, folder = SoftGpu(), tmp_path / "run"
    done, _ = train(gpu, folder, "backend=gpu-fused", "trainer.profile=true", "dataset.train_size=64")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^gpu-fused step +between the parts \d+%", done.stdout, re.MULTILINE)
    told = python("-m", "cnnexp", "explain", folder, env=gpu.environment())
    assert re.search(r"^linear1 loss forward +gpu-fused +[\d.]+ ", told, re.MULTILINE)
    assert re.search(r"^updating the parameters +gpu-fused +[\d.]+ ", told, re.MULTILINE)
    profile = json.loads((folder / "profile.json").read_text())
    assert "multiprocessors" in str(profile)
    assert profile["device"].startswith("software GPU")
    assert profile["machine"]["gflops"] > 0
