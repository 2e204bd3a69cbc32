import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from cnnexp.system.signals import held


@pytest.mark.parametrize(("signals", "completed"), [(1, [1]), (2, [])])
def test_a_signal_waits_for_the_end_of_the_block_and_who_asks_twice_does_not(signals, completed):
    done = []

    def block():
        with held():
            for _ in range(signals):
                signal.raise_signal(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == completed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_is_told_and_other_threads_may_use_it():
    with pytest.raises(ValueError, match="mine"), held():
        raise ValueError("mine")

    def work():
        with held():
            return 1

    with ThreadPoolExecutor() as pool:
        assert pool.submit(work).result() == 1
