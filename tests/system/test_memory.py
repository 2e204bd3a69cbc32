import re

import pytest
from commands import raises
from tables import each

from cnnexp import SGD, Adam, Conv2d, Flatten, Linear, Network, ReLU, Synthetic, backend
from cnnexp.errors import OutOfMemory
from cnnexp.measuring import footprint
from cnnexp.system import memory

NETWORK = Network((6, 6, 1), (Conv2d(2, 3), ReLU(), Flatten(), Linear(3)))


@each(
    ({"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 1\ninactive_file 200"}, [500]),
    ({"memory.max": "max", "memory.current": "700", "memory.stat": "inactive_file 200"}, []),
    ({"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "900", "memory.stat": "total_inactive_file 1"}, [101]),
    ({"memory.limit_in_bytes": str(2**63 - 4096), "memory.usage_in_bytes": "9", "memory.stat": ""}, []),
    ({}, []),
)
def test_limits_of_control_groups(tmp_path, files, wanted):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert [left for left, _ in memory._cgroup(tmp_path)] == wanted


def test_what_can_be_had_is_less_than_the_machine_has_and_a_ulimit_counts():
    there, limit = memory.available()
    assert 0 < there < 1 << 50
    assert limit
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 44, before[1]))
        limits = dict(reversed(limit) for limit in memory._limits())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert 0 < limits["ulimit -v"] < 1 << 44


def test_too_much_is_one_line_with_the_largest_part_and_its_key(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: (5_000_000, "ulimit -v"))
    parts = [memory.Part("small things", 1_000_000, "x"), memory.Part("large things", 4_500_000, "trainer.batch_size")]
    memory.need(parts[1:])
    said = "needs 5500000 bytes (5.5 MB) of memory, 4.5 MB of them for large things; 5 MB can be had (ulimit -v); "
    raises(OutOfMemory, f"^{re.escape(said)}lower trainer.batch_size$", memory.need, parts)
    assert memory.show(10**60) == "1e+42 EB"


def test_parts_of_a_layerwise_program_are_those_that_it_allocates():
    """x, and an activation and a gradient per layer, counted by hand; Flatten is a view."""
    values = 36 + 2 * (4 * 4 * 2) + 2 * (4 * 4 * 2) + 2 * 3
    weights, activations = footprint.program(NETWORK, Adam(), 10, backend("numpy"))
    assert weights.bytes == 4 * (9 * 2 + 2 + 32 * 3 + 3) * (1 + 1 + 2)
    assert (activations.bytes, activations.key) == (4 * 10 * values, "trainer.batch_size")


def test_data_scores_and_workers_count():
    data = Synthetic(height=6, width=6, classes=3, train_size=20, test_size=10).load()
    alone = sum(part.bytes for part in footprint.training(NETWORK, SGD(), 10, backend("numpy"), data))
    parts = [*footprint.training(NETWORK, SGD(), 10, backend("numpy"), data, workers=500)]
    assert sum(part.bytes for part in parts) > alone + 499 * footprint.PROCESS_BYTES
    assert max(parts, key=lambda part: part.bytes).key == "workers.count"
    assert next(part.bytes for part in parts if part.key == "dataset.test_size") == 4 * 10 * 3
