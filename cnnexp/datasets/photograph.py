"""A photograph of one thing on a plain ground, brought to the look of the images that a model was trained on.

MNIST's digits, light on black, were scaled to fit a box of 20 pixels and put by their centre of mass into 28 x 28
(LeCun, Bottou, Bengio and Haffner 1998, section III.A). Nobody's photographs are. What a data set did to its images is
read from them, `describe`, and kept with the model; `prepare` does it to a picture, `unlike` says what still differs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SAMPLE = 2000  # images that `describe` looks at
PLAIN = 0.6  # share of the borders' pixels that are ground, from which on it is called plain; ink may reach there
TIGHT = 1 / 16  # of the images' side, that the place and half the size of what they show may vary
EVEN = 0.1  # of the range of pixels, that ground may differ from itself
INK = 0.2  # of the range of pixels, from which on a pixel is no ground
GRID = 7  # side of the coarse image that distances are taken of
RARE = 0.5  # per cent of the training images, at each end, that look stranger than what is called like them
FINE = 4  # times the model's side: a larger picture is shrunk to it first, which averages noise away
NO_STROKE = "no stroke"
REACH = 2  # pixels: ink so near belongs to the same stroke
PART = 0.5  # of the largest piece's side, and
MOST_THINGS = 9  # more are noise
SHARE = 0.3  # of its ink, from which on a piece is a thing of its own
NOISE = 4.0  # standard deviations of the ground, from which on a pixel is ink
Look = Mapping[str, Any]


def describe(images: np.ndarray, labels: np.ndarray, classes: int) -> Look | None:
    """Return what grey images, uint8 (N, H, W, 1), of one thing on a plain ground have in common, None for others.

    It has about the same size and place in all of them: else these may be what tells the classes apart.

    `ground` (a pixel), `side` (of the box, in pixels), `by_mass` (centred by mass, or by the box), `ink` and `distance`
    (least and most of what is usual), and `centres` (of the classes, coarse, `GRID` x `GRID` each).
    """
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 1 or min(images.shape[1:3]) < GRID:
        return None
    images, labels = images[:SAMPLE, :, :, 0] / np.float32(255), labels[:SAMPLE]
    border = _border(images)
    ground = float(np.percentile(border, 50))  # `median` is slow to start
    if np.mean(np.abs(border - ground) <= EVEN) < PLAIN:
        return None
    ink = np.abs(images - ground)
    seen = ink > INK
    seen, shown = seen[marked := seen.any(axis=(1, 2))], ink[marked]
    if not len(seen):
        return None
    (top, bottom), (left, right) = _span(seen, -1), _span(seen, -2)
    sides, boxed = np.maximum(bottom - top, right - left), np.stack([top + bottom - 1, left + right - 1], axis=1) / 2
    low, side, high = np.percentile(sides, (10, 50, 90))
    off = [np.std(centres - _middle(images.shape[1:])) for centres in (_mass_centre(shown), boxed)]
    if max(min(off), (high - low) / 2) > TIGHT * max(images.shape[1:]):
        return None
    coarse = _coarse(ink)
    centres = np.stack([coarse[labels == c].mean(axis=0) if (labels == c).any() else coarse[0] for c in range(classes)])
    return {
        "ground": round(ground, 4),
        "side": int(side),
        "by_mass": bool(off[0] < off[1]),
        "ink": _usual(ink.mean(axis=(1, 2))),
        "distance": _usual(np.sqrt(((coarse[:, None] - centres[None]) ** 2).sum(axis=2).min(axis=1))),
        "centres": np.round(centres, 3).tolist(),
    }


def prepare(picture: np.ndarray, look: Look | None, shape: Sequence[int]) -> np.ndarray:
    """Return a picture, uint8 (h, w, 4) with alpha, as uint8 of `shape` (H, W, C), by a look of `describe`, if any."""
    flat = flatten(picture)
    if look is None or shape[2] != 1:
        pixels = flat if shape[2] == 3 else _grey(flat)[:, :, None]
        resized = [_resize(pixels[:, :, c], shape[1], shape[0]) for c in range(shape[2])]
        return np.rint(np.stack(resized, axis=2)).astype(np.uint8)
    grey = _grey(flat)
    if grey.shape == tuple(shape[:2]):
        given = np.rint(grey).astype(np.uint8)[:, :, None]
        if abs(np.median(_border(given[None, :, :, 0] / 255)) - look["ground"]) <= EVEN and unlike(given, look) is None:
            return given  # it is as they are
    ink = _ink(_shrink(grey, FINE * max(shape[:2])) / 255)
    seen, placed = ink > INK, np.zeros(shape[:2], np.float32)
    if seen.any():
        (top, bottom), (left, right) = ((int(first), int(past)) for first, past in (_span(seen, -1), _span(seen, -2)))
        scale = look["side"] / max(bottom - top, right - left)
        height = max(1, min(shape[0], round(scale * (bottom - top))))
        width = max(1, min(shape[1], round(scale * (right - left))))
        small = np.clip(_resize(255 * ink[top:bottom, left:right], width, height) / 255, 0, 1)
        centre = _mass_centre(small) if look["by_mass"] else _middle(small.shape)
        room = np.subtract(shape[:2], small.shape)
        row, column = np.rint(_middle(shape[:2]) - centre).clip(0, room).astype(int)
        placed[row : row + height, column : column + width] = small
    ground = look["ground"]  # ink lies towards the farther end of the range
    return np.rint(255 * (ground + placed * (1 - ground if ground < 0.5 else -ground))).astype(np.uint8)[:, :, None]


def unlike(image: np.ndarray, look: Look) -> str | None:
    """Return in what an image, uint8 (H, W, 1), is not like those of `describe`; None where it is like them."""
    ink = np.abs(image[:, :, 0] / np.float32(255) - look["ground"])
    least, most = look["ink"]
    if not least <= ink.mean() <= most:
        return f"{'less' if ink.mean() < least else 'more'} ink than they have"
    distance = np.sqrt(((_coarse(ink) - np.array(look["centres"])) ** 2).sum(axis=1).min())
    return "a shape unlike theirs" if distance > look["distance"][1] else None


def count(picture: np.ndarray, shape: Sequence[int]) -> str | None:
    """Return why a picture does not show one thing: `no stroke`, or how many things; None where it does.

    It is uint8 (h, w, 4) with alpha; the model's images are of `shape` (H, W, C).
    """
    grey = _shrink(_grey(flatten(picture)), FINE * max(shape[:2])) / 255
    seen = _ink(grey) > INK
    if not seen.any():
        return f"{NO_STROKE}: {'the picture is blank' if np.ptp(grey) <= EVEN else 'nothing stands out of its noise'}"
    padded = np.pad(seen, 1).astype(np.int8)
    rows, columns = seen.shape
    around = sum(padded[i : i + rows, j : j + columns] for i in range(3) for j in range(3))
    held = seen & (around > 2)
    pieces = _pieces(held)
    side, ink = (max(values, default=0) for values in (zip(*pieces, strict=True) if pieces else ((), ())))
    things = sum(s >= PART * side and n >= SHARE * ink for s, n in pieces)
    if 2 * held.sum() < seen.sum() or things > MOST_THINGS:
        return f"{NO_STROKE}: only specks"
    names = {2: "two", 3: "three"}
    return f"{names.get(things, things)} things: give a picture of one" if things > 1 else None


def _pieces(mask: np.ndarray) -> list[tuple[int, int]]:
    """Return the longer side and the number of pixels of each piece of a mask, what is within `REACH` being one."""
    left, pieces = {(int(r), int(c)) for r, c in np.argwhere(mask)}, []
    steps = range(-REACH, REACH + 1)
    while left:
        piece = [left.pop()]
        for r, c in piece:  # which grows
            near = {(r + i, c + j) for i in steps for j in steps} & left
            left -= near
            piece += near
        (top, first), (bottom, last) = np.min(piece, axis=0), np.max(piece, axis=0)
        pieces.append((int(max(bottom - top, last - first)) + 1, len(piece)))
    return pieces


def flatten(picture: np.ndarray) -> np.ndarray:
    """Return a picture, uint8 (h, w, 4), as (h, w, 3) on the ground, white or black, that shows what is opaque."""
    colours, alpha = picture[:, :, :3].astype(np.float32), picture[:, :, 3:].astype(np.float32) / 255
    if alpha.min() == 1:
        return colours
    light = (_grey(colours) * alpha[:, :, 0]).sum() > 127 * max(alpha.sum(), 1e-6)
    return colours * alpha + (0.0 if light else 255.0) * (1 - alpha)


def _grey(colours: np.ndarray) -> np.ndarray:
    return colours @ np.array([0.299, 0.587, 0.114], np.float32)


def _ink(grey: np.ndarray) -> np.ndarray:
    """Return how much of each pixel is ink, 0 .. 1, whether dark on light or light on dark.

    The ground is a plane through the border, since light falls from a side; what differs from it no more than it
    differs from itself is noise.
    """
    height, width = grey.shape
    rows, columns = np.mgrid[:height, :width]
    frame = np.zeros(grey.shape, bool)
    edge = max(1, min(height, width) // 20)
    frame[:edge] = frame[-edge:] = frame[:, :edge] = frame[:, -edge:] = True
    around = grey[frame]
    near = np.abs(grey - np.median(around)) <= max(EVEN, 3 * np.median(np.abs(around - np.median(around))))
    known = frame & near  # ink may reach the border
    plane = np.stack([np.ones(known.sum()), rows[known], columns[known]], axis=1)
    fitted, *_ = np.linalg.lstsq(plane, grey[known], rcond=None)
    differs = grey - (fitted[0] + fitted[1] * rows + fitted[2] * columns)
    noise = 1.4826 * np.median(np.abs(differs[known]))
    differs = differs if differs.max() > -differs.min() else -differs
    ink = np.where(differs > NOISE * noise, differs, 0.0)
    full = np.percentile(ink[ink > 0], 90) if (ink > 0).any() else 1.0
    return np.clip(ink / max(full, 1e-6), 0, 1).astype(np.float32)


def _shrink(grey: np.ndarray, side: int) -> np.ndarray:
    scale = min(1.0, side / max(grey.shape))
    height, width = (max(1, round(scale * n)) for n in grey.shape)
    return _resize(grey, width, height)


def _resize(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    from PIL import Image

    if pixels.shape == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels.astype(np.float32)).resize((width, height), Image.Resampling.BILINEAR))


def _border(images: np.ndarray) -> np.ndarray:
    """Return the outermost pixels of images (N, H, W), as (N, pixels)."""
    return np.concatenate((images[:, 0], images[:, -1], images[:, 1:-1, 0], images[:, 1:-1, -1]), axis=1)


def _span(mask: np.ndarray, along: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first place of (..., H, W) where anything along an axis is set, and the place past the last."""
    found = np.asarray(mask.any(axis=along))
    return found.argmax(axis=-1), found.shape[-1] - found[..., ::-1].argmax(axis=-1)


def _middle(shape: Sequence[int]) -> np.ndarray:
    return (np.array(shape) - 1) / 2


def _mass_centre(ink: np.ndarray) -> np.ndarray:
    """Return row and column (..., 2) of what images (..., H, W) weigh about."""
    rows, columns = (np.arange(n) for n in ink.shape[-2:])
    return np.stack([ink.sum(axis=-1) @ rows, ink.sum(axis=-2) @ columns], axis=-1) / ink.sum(axis=(-2, -1))[..., None]


def _coarse(ink: np.ndarray) -> np.ndarray:
    """Return images (..., H, W) as (..., GRID * GRID); resizing is linear in rows and in columns."""
    height, width = ink.shape[-2:]
    rows, columns = _resize(np.eye(height), height, GRID), _resize(np.eye(width), width, GRID)
    return (rows @ ink @ columns.T).reshape(*ink.shape[:-2], GRID * GRID)


def _usual(values: np.ndarray) -> list[float]:
    least, most = np.percentile(values, (RARE, 100 - RARE))
    return [float(np.floor(least * 1e4) / 1e4), float(np.ceil(most * 1e4) / 1e4)]
