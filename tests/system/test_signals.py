import signal
import threading

import pytest

from cnnexp.system.signals import held


def test_a_signal_waits_for_the_end_of_the_block():
    done = []

    def block():
        with held():
            signal.raise_signal(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_asks_twice_is_not_kept_waiting():
    done = []

    def block():
        with held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_is_told_and_other_threads_may_use_it():
    with pytest.raises(ValueError, match="mine"), held():
        raise ValueError("mine")
    done = []

    def work():
        with held():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]
