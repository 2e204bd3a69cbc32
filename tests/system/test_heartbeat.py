import threading

import pytest

from cnnexp.system.heartbeat import Heartbeat, beat


def looks_until_stopped(heartbeat, signs):
    return next((n for n, sign in enumerate(signs, 1) if heartbeat.look(sign)), None)


def test_silence_is_counted_in_looks_and_ends_with_a_sign():
    heartbeat = Heartbeat(timeout_s=3.0, look_s=1.0)
    assert not any(heartbeat.look(sign) for sign in (1, 1, 1, 2, 2, 2))
    assert heartbeat.silent_s == 2
    assert heartbeat.look(2)
    assert not heartbeat.look(3)
    assert heartbeat.silent_s == 0


@pytest.mark.parametrize(("start_timeout_s", "looks"), [(None, 2), (4.0, 4)])
def test_a_process_that_starts_may_take_longer_to_its_first_sign(start_timeout_s, looks):
    assert looks_until_stopped(Heartbeat(2.0, 1.0, start_timeout_s), [0] * 10) == looks
    assert looks_until_stopped(Heartbeat(2.0, 1.0, start_timeout_s), [0, 1] + [1] * 10) == 4


def test_a_sign_is_given_at_once_and_again_until_the_end():
    given, ended = [], threading.Event()

    def give_sign():
        given.append(threading.current_thread())
        if len(given) == 3:
            ended.set()

    beat(give_sign, 0.001, ended)
    assert ended.wait(60)
    given[0].join(60)
    assert len(given) == 3
    assert given[0] is not threading.current_thread()
