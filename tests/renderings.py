"""A digit as people would photograph it: nine renderings of a 28 x 28 image, light on black."""

import io

import numpy as np
from PIL import Image


def renderings(digit, seed=0):
    """Return RGBA pictures, uint8 (h, w, 4), by name, of a digit, uint8 (28, 28)."""
    rng = np.random.default_rng(seed)
    large = np.asarray(Image.fromarray(digit).resize((280, 280), Image.Resampling.BICUBIC))
    dark = 255 - large
    margin = np.full((480, 640), 255, np.uint8)
    margin[140:420, 300:580] = dark
    # ink on grey paper, lit from the left, with noise
    shade = np.linspace(210, 150, 640)[None, :] - np.linspace(0, 20, 480)[:, None]
    photo = shade * (1 - 0.75 * (255 - margin) / 255) + rng.normal(0, 6, margin.shape)
    rows, columns = np.flatnonzero((large > 60).any(axis=1)), np.flatnonzero((large > 60).any(axis=0))
    tight = dark[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    ink = np.zeros((280, 280, 4), np.uint8)
    ink[:, :, 3] = large  # black ink; where there is none, nothing
    return {
        "28 pixels": opaque(digit),
        "280 pixels": opaque(large),
        "dark on light": opaque(dark),
        "RGB": opaque(np.stack([dark, dark, np.maximum(dark, 120)], axis=2)),
        "RGBA": opaque(255 - np.stack([digit] * 3, axis=2)),
        "transparent": ink,
        "margin": opaque(margin),
        "photo": opaque(np.clip(photo, 0, 255).astype(np.uint8)),
        "tight crop": opaque(tight),
    }


def png(pixels):
    """Return pixels, uint8 (h, w) or (h, w, channels), as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def opaque(pixels):
    colours = pixels if pixels.ndim == 3 else np.stack([pixels] * 3, axis=2)
    return np.concatenate([colours, np.full((*colours.shape[:2], 1), 255, np.uint8)], axis=2)
