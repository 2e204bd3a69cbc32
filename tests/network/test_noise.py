import numpy as np
import pytest

from cnnexp.network.noise import MASK, keeps, layer_key, mix, threshold

IMAGES = np.array([3, 0, 59_999, 17])


def test_mix_is_the_same_on_python_numbers_and_arrays_and_hits_no_value_twice():
    values = np.arange(1 << 16, dtype=np.int64)
    mixed = mix(values)
    assert mixed.tolist() == [mix(int(value)) for value in values]
    assert len(set(mixed.tolist())) == len(values)
    assert 0 <= mixed.min() <= mixed.max() <= MASK
    assert mix(MASK) <= MASK


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_the_rate_is_kept(rate):
    kept = keeps(layer_key(1, 1, "dropout1"), rate, np.arange(100), 1000)
    assert abs(1 - kept.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / 1e5) + 1e-12
    # of every image and of every place in it, not only of all
    for axis, count in ((0, 100), (1, 1000)):
        assert np.abs(1 - kept.mean(axis=axis) - rate).max() < 5.5 * np.sqrt(rate * (1 - rate) / count) + 1e-12


def test_neighbours_tell_nothing_of_each_other():
    key = layer_key(0, 1, "dropout1")
    kept = keeps(key, 0.5, np.arange(200), 500).astype(float) - 0.5
    later = keeps(layer_key(0, 2, "dropout1"), 0.5, np.arange(200), 500) - 0.5
    other = keeps(layer_key(0, 1, "dropout2"), 0.5, np.arange(200), 500) - 0.5
    for a, b in ((kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1]), (kept, later), (kept, other)):
        assert abs((a * b).mean()) < 4 * 0.25 / np.sqrt(a.size)


def test_a_mask_follows_from_the_image_wherever_it_stands_and_keys_differ():
    key = layer_key(5, 9, "residual1.dropout1")
    together = keeps(key, 0.3, IMAGES, 50)
    for image, row in zip(IMAGES, together, strict=True):
        np.testing.assert_array_equal(keeps(key, 0.3, np.array([image]), 50)[0], row)

    places = ((0, 1, "a"), (1, 1, "a"), (0, 2, "a"), (0, 1, "b"), (1 << 32, 1, "a"), (-1, 1, "a"))
    keys = {layer_key(*place) for place in places}
    assert len(keys) == 6
    assert all(0 <= key <= MASK for key in keys)
    assert threshold(0.5) == 1 << 31
