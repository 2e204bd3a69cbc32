import pytest

from cnnexp import Conv2d, Flatten, Linear, Network, ReLU, TwoConvMlp
from cnnexp.measuring import cost_model
from cnnexp.measuring.cost_model import Costs, Training

COSTS = Costs(t_c=1e-9, t_s=1e-5, t_b=1e-9)


def test_operations_and_an_epoch_by_hand():
    network = Network((6, 6, 2), (Conv2d(4, 3), ReLU(), Flatten(), Linear(5)))
    conv, linear = 4 * 4 * 4 * (2 * 3 * 3 * 2 + 1), 5 * (2 * 64 + 1)
    assert cost_model.operations(network) == 3 * (conv + linear)

    training = Training(operations=1000, images=100, averages=3, floats=500)
    assert cost_model.epoch_s(COSTS, training, 1) == (pytest.approx(1e-4), 0)
    reduce_s = cost_model.all_reduce_s(COSTS, 500, 3)
    assert cost_model.epoch_s(COSTS, training, 3) == pytest.approx((34e-6, 3 * reduce_s))
    # four workers on two cores compute as fast as two
    assert cost_model.epoch_s(COSTS, training, 4, cores=2)[0] == pytest.approx(50e-6)


def test_an_all_reduce_of_one_worker_costs_nothing_and_its_constants_are_found_again():
    assert cost_model.all_reduce_s(COSTS, 1000, 1) == 0
    assert cost_model.all_reduce_s(COSTS, 1000, 2) == pytest.approx(2e-5 + 4000 * 1e-9)
    for workers in (2, 4, 7):
        timed = [(floats, cost_model.all_reduce_s(COSTS, floats, workers)) for floats in (1, 1 << 18)]
        assert cost_model.fit_links(*timed, workers) == pytest.approx((COSTS.t_s, COSTS.t_b), rel=1e-6)


@pytest.mark.parametrize(
    ("sync", "period", "averages"), [("gradients", None, 10), ("parameters", None, 1), ("parameters", 3, 4)]
)
def test_how_often_an_epoch_averages(sync, period, averages):
    assert cost_model.averages_per_epoch(images=95, batch_size=10, sync=sync, period=period) == averages


def test_rows_say_where_more_workers_stop_paying_and_break_even_is_there():
    network = TwoConvMlp().network((28, 28, 1), 10)
    rows = list(cost_model.extrapolate(COSTS, network, 60_000, 64, network.parameter_count, "parameters"))
    assert len(rows) == 3 * 8
    assert {row["link"] for row in rows} == set(cost_model.LINKS)
    slow, _, fast = (rows[8 * i : 8 * i + 8] for i in range(3))
    for row in slow:
        alone = slow[0]["epoch_s"]
        assert row["epoch_s"] == pytest.approx(row["compute_s"] + row["communicate_s"])
        assert row["speedup"] == pytest.approx(alone / row["epoch_s"])
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["workers"])
    efficiencies = [row["efficiency"] for row in slow]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert fast[-1]["speedup"] > slow[-1]["speedup"]

    training = Training(operations=1000, images=1 << 20, averages=1, floats=500)
    workers = cost_model.break_even(COSTS, training)
    for count, later in ((workers // 2, False), (workers, True)):
        compute, communicate = cost_model.epoch_s(COSTS, training, count)
        assert (communicate >= compute) == later
    assert cost_model.break_even(Costs(1e-9, 0.0, 0.0), training, limit=64) == 64
