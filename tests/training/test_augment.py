"""Augmentation: each transformation against SciPy on the same draws, and the same bytes whoever makes them."""

import zlib

import numpy as np
import pytest
from commands import raises
from fakes import FakeClock, FakeProgram
from scipy import ndimage
from tables import each
from training import test_loop

from cnnexp import SGD, Conv2d, Dataset, Dropout, Flatten, Linear, Loss, Network, Split, TrainingPlan, train_epochs
from cnnexp.backends import backend_class
from cnnexp.errors import ConfigError
from cnnexp.training import augment
from cnnexp.training.augment import AUGMENTATIONS, Affine, Augmenter, CropFlip, Cutout, Elastic, Shift
from cnnexp.training.loop import epoch_order
from cnnexp.workers import Local

SEED, EPOCH = 2**40 + 7, 3
KINDS = [Shift(3), CropFlip(3, 0.5), Affine(40.0, 3.0, 0.4, 30.0), Elastic(12.0, 2.0), Cutout(5)]
NETWORK = Network((9, 9, 1), (Conv2d(3, 3), Flatten(), Dropout(0.3), Linear(2)))
COMPILING = NETWORK, Loss.SOFTMAX_CROSS_ENTROPY, SGD(lr=0.05), 8


def mix(x):
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) % 2**32
    return x ^ (x >> 16)


def draws(name, image, count):
    """Return numbers from 0 to 1, in the arithmetic of Python's whole numbers."""
    key = 0
    for part in (SEED % 2**32, SEED >> 32, EPOCH, 0, zlib.crc32(f"augment.{name}".encode())):
        key = mix(key ^ part)
    row = mix(key ^ image)
    return np.array([mix(row ^ mix(element)) for element in range(count)], float) / 2**32


def images(dtype=np.uint8):
    # smooth, with an edge that is not black
    drawn = ndimage.gaussian_filter(np.random.default_rng(5).random((6, 13, 11, 2)), (0, 1, 1, 0))
    drawn = (drawn - drawn.min()) / (drawn.max() - drawn.min())
    return np.round(255 * drawn).astype(np.uint8) if dtype == np.uint8 else (3 * drawn - 1).astype(np.float32)


def whole(u, most):
    return int(np.floor(u * (2 * most + 1))) - most


def seen_at(kind, image, height, width):
    """Return (matrix, offset) for which output place p shows input place matrix @ p + offset, from the definitions."""
    eye, center = np.eye(2), np.array([(height - 1) / 2, (width - 1) / 2])
    u = draws(kind.name, image, 5)
    match kind:
        case Shift():
            return eye, -np.array([whole(u[0], kind.pixels), whole(u[1], kind.pixels)])
        case CropFlip():
            moved = -np.array([whole(u[0], kind.padding), whole(u[1], kind.padding)], float)
            if u[2] >= kind.flip:
                return eye, moved
            return np.diag([1, -1]), moved + np.array([0, width - 1])
        case Affine():
            s = 2 * u - 1
            angle, lean = np.radians(kind.rotation * s[0]), np.tan(np.radians(kind.shear * s[4]))
            turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            back = np.linalg.inv((1 + kind.scale * s[3]) * turn @ np.array([[1, 0], [lean, 1]]))
            return back, center - back @ (center + kind.translation * s[1:3])
    return eye, np.zeros(2)


def expected(kinds, image, picture):
    """Return what SciPy makes of a picture (H,W,C): one map of coordinates, one interpolation, then what is covered."""
    height, width, _ = picture.shape
    places = np.indices((height, width)).reshape(2, -1).astype(float)
    by_name = {kind.name: kind for kind in kinds}
    if "elastic" in by_name:
        elastic = by_name["elastic"]
        noise = 2 * (draws("elastic", image, 2 * height * width) * 2**32 + 2**31) % 2**33 / 2**32 - 1
        for axis, field in enumerate(noise.reshape(2, height, width)):
            smooth = ndimage.gaussian_filter(field, elastic.sigma, mode="constant", truncate=3)
            places[axis] += elastic.alpha * smooth.reshape(-1)
    for name in ("affine", "crop_flip", "shift"):
        if name in by_name:
            matrix, offset = seen_at(by_name[name], image, height, width)
            places = matrix @ places + offset[:, None]
    planes = picture.astype(float).transpose(2, 0, 1)
    found = [ndimage.map_coordinates(plane, places, order=1, mode="grid-constant") for plane in planes]
    found = np.stack(found, axis=1).reshape(picture.shape)
    if "cutout" in by_name:
        size, u = by_name["cutout"].size, draws("cutout", image, 2)
        top, left = int(u[0] * height) - size // 2, int(u[1] * width) - size // 2
        found[max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)] = 0
    return found


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), KINDS], ids=lambda k: "+".join(kind.name for kind in k))
def test_every_transformation_does_as_scipy_does(kinds, dtype):
    pictures = images(dtype=dtype)
    out, places = np.empty_like(pictures), np.array([4, 0, 5, 3, 1, 2])
    Augmenter(kinds, pictures, SEED).fill(EPOCH, places, out)
    assert any(not np.array_equal(out[n], pictures[image]) for n, image in enumerate(places))
    for n, image in enumerate(places):
        wanted = expected(kinds, image, pictures[image])
        # float32 coordinates, to about 1e-5 of a pixel; bytes are rounded to the nearest
        atol = 0.51 if dtype == np.uint8 else 1e-4
        np.testing.assert_allclose(out[n], wanted, rtol=0, atol=atol)


def test_every_epoch_and_every_seed_sees_other_images_and_no_image_another_places():
    pictures = images()

    def made(epoch, seed=SEED, places=(1, 4), kinds=KINDS):
        out = np.empty((len(places), *pictures.shape[1:]), np.uint8)
        Augmenter(kinds, pictures, seed).fill(epoch, np.array(places), out)
        return out

    np.testing.assert_array_equal(made(2), made(2))
    np.testing.assert_array_equal(made(2, places=(5, 4))[1], made(2)[1])
    for kind in KINDS:
        assert not np.array_equal(made(2, kinds=[kind]), made(3, kinds=[kind])), kind
        assert not np.array_equal(made(2, kinds=[kind]), made(2, SEED + 2**35, kinds=[kind])), kind


class Fed(FakeProgram):
    """Remembers the bytes of every image that it is trained on, with its label and its place in what it was given."""

    def __init__(self, batch_size=8, per_image_s=0.01):
        super().__init__(FakeClock(), per_image_s, batch_size=batch_size)
        self.seen = []

    def load(self, images, labels):
        return images, labels

    def predict(self, handle):
        return super().predict(handle[0])

    def train(self, handle, order, rate):
        self.seen += [(handle[0][place].tobytes(), int(handle[1][place]), int(place)) for place in order]
        return super().train(handle, order, rate)


PICTURES = np.random.default_rng(1).integers(0, 256, (300, 9, 9, 1), np.uint8)
SPLIT = Split(PICTURES, (np.arange(300) % 2).astype(np.int32))
DATA = Dataset("made", SPLIT, SPLIT[:10], None, ("a", "b"), "made here", "0" * 64)


def run(program, epochs=2, **options):
    return test_loop.run(program, DATA, epochs, seed=5, augment=(Affine(), Cutout()), **options)


@pytest.fixture
def small_parts(monkeypatch):
    """Some batches at a time, as with more images than these."""
    monkeypatch.setattr(augment, "AHEAD_IMAGES", 24)


def as_augmented(epoch, count=300):
    """Return the bytes of the images that an epoch begins with, as the augmenter makes them of the order."""
    out = np.empty((count, 9, 9, 1), np.uint8)
    Augmenter((Affine(), Cutout()), PICTURES, 5).fill(epoch, epoch_order(300, 5, epoch)[:count], out)
    return [image.tobytes() for image in out]


def test_training_sees_each_image_of_the_order_as_its_epoch_has_it(small_parts):
    slow, fast = Fed(per_image_s=1.0), Fed(per_image_s=1e-6)  # so that calls are of other numbers of batches
    run(slow)
    run(fast)
    assert len(slow.orders) > len(fast.orders)
    assert slow.seen == fast.seen
    for epoch in (1, 2):
        seen = slow.seen[300 * (epoch - 1) : 300 * epoch]
        assert [image for image, _, _ in seen] == as_augmented(epoch)
        assert [label for _, label, _ in seen] == SPLIT.labels[epoch_order(300, 5, epoch)].tolist()


def test_a_run_that_goes_on_sees_the_bytes_of_one_never_stopped(small_parts):
    notes, whole, rest = test_loop.Seen(), Fed(), Fed(per_image_s=0.02)
    first, _ = run(whole, observers=[notes], progress_batches=4)
    stopped = next(note for note in notes if note.epoch == 2 and note.totals.count == 64)
    run(rest, earlier=[first], begun=stopped)
    assert whole.seen[300 + 64 :] == rest.seen


def test_an_epoch_that_ends_early_leaves_nothing_behind(small_parts):
    program = Fed(batch_size=8, per_image_s=0.01)
    run(program, pass_s=0.6, epochs=3)
    count = len(program.seen) // 3
    assert 8 <= count < 300
    for epoch in (1, 2, 3):
        assert [seen[0] for seen in program.seen[count * (epoch - 1) :][:count]] == as_augmented(epoch, count)


def trained(program):
    program.restore(NETWORK.initial_state(4))
    list(train_epochs(program, DATA, TrainingPlan(2, 5, augment=(Affine(), Cutout()))))
    state = program.state()
    program.close()
    return state["parameters"]


@pytest.mark.parametrize("backend", ["cpu", "cpu-simd", "unrolled"])
def test_backends_train_on_the_same_images(backend, small_parts):
    a, b = (trained(backend_class(name)().compile(*COMPILING)) for name in ("numpy", backend))
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sync", ["gradients", "parameters", "hybrid"])
def test_workers_train_on_the_same_images(sync, small_parts):
    backend, workers = backend_class("numpy")(), Local(count=2, sync=sync, period=1 if sync == "parameters" else None)
    a, b = trained(backend.compile(*COMPILING)), trained(workers.compile(backend, *COMPILING))
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@each(
    (Shift(11), "shift.pixels=11"),
    (CropFlip(12), "crop_flip.padding=12"),
    (Affine(translation=11.5), "affine.translation=11.5"),
    (Cutout(12), "cutout.size=12"),
)
def test_what_is_larger_than_the_images_is_refused(kind, key):
    raises(ConfigError, f"augment.{key}: .* 13 x 11 pixels; must be less than 11", Augmenter, [kind], images(), 0)


def test_no_height_or_one_kind_twice_is_refused_and_a_checkpoint_knows_what_was_trained_on():
    with pytest.raises(ConfigError, match=r"augment=\['shift'\]: needs .* with height and width; these have \(4,\)"):
        Augmenter([Shift()], np.zeros((3, 4), np.float32), 0)
    raises(ConfigError, "each kind once", Augmenter, [Shift(), Shift(3)], images(), 0)
    assert augment.describe((Cutout(3), Shift(1))) == {"cutout": {"size": 3}, "shift": {"pixels": 1}}
    assert list(AUGMENTATIONS) == [kind.name for kind in KINDS]
