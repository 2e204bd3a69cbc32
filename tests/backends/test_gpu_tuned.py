"""The search of `gpu-tuned`, with made-up times: no GPU is needed to choose among numbers."""

import json
from dataclasses import asdict

from cnnexp.backends.gpu.device import Gpu
from cnnexp.backends.gpu.kernels.index import ConvSizes
from cnnexp.backends.gpu.tuned import REPEATS, TunedOps, candidates, fastest

GPU = Gpu(0, "a GPU", (9, 0), (13, 0), (13, 0), 132, 1024, 48 * 1024)
ONE_CONV = ConvSizes(H=28, W=28, C=1, K=3, F=64, stride=1, top=0, left=0, P=26, Q=26)
WIDE = ConvSizes(H=64, W=64, C=256, K=7, F=512, stride=2, top=3, left=3, P=32, Q=32)


def test_candidates_fit_on_the_gpu_and_differ():
    little = Gpu(0, "a small GPU", (7, 5), (13, 0), (13, 0), 2, 64, 512)
    for sizes, gpu in ((ONE_CONV, GPU), (WIDE, GPU), (ONE_CONV, little)):
        plans = candidates(sizes, gpu)
        assert len(plans) == len(set(plans))
        assert len(plans) >= 4 or [plan.tile for plan in plans] == [1]
        for plan in plans:
            assert plan.block <= gpu.block_threads
            assert gpu is little or 4 * plan.channels * (plan.side**2 + sizes.K**2 * plan.filters) <= gpu.shared_bytes
            assert 1 <= plan.channels <= sizes.C


def test_the_smallest_median_wins_whatever_an_outlier_says():
    plans = candidates(ONE_CONV, GPU)[:3]
    calls = dict.fromkeys(plans, 0)

    def seconds(plan):
        calls[plan] += 1
        if plan == plans[1]:
            return 9.0 if calls[plan] == 2 else 1.0
        return 0.5 if calls[plan] == 2 else 2.0

    assert fastest(plans, seconds) == plans[1]
    assert set(calls.values()) == {REPEATS + 1}


def test_a_choice_is_measured_once_by_gpu_batch_and_shape(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("cnnexp.backends.gpu.device.empty", lambda shape, dtype: None)
    measured = []

    def plan_of(batch_size, sizes, is_flipped):
        ops = TunedOps(GPU, batch_size)
        monkeypatch.setattr(ops, "_measured", lambda *shape: measured.append(shape) or json.dumps(asdict(one)).encode())
        return [ops._plan(sizes, is_flipped) for _ in range(2)]

    one = candidates(ONE_CONV, GPU)[0]
    for _ in range(2):
        assert plan_of(8, ONE_CONV, False) == plan_of(9, ONE_CONV, False) == plan_of(8, ONE_CONV, True) == [one, one]
        assert len(measured) == 3
    for kept in tmp_path.rglob("*.bin"):
        kept.write_bytes(b"{")  # damaged: measured anew
    assert plan_of(8, ONE_CONV, False) == [one, one]
    assert len(measured) == 4
