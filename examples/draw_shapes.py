"""Draw pictures to train on, as people keep theirs: `shapes/circle/000.png`, and squares and triangles likewise.

python examples/draw_shapes.py
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIDE, EACH = 32, 150

rng = np.random.default_rng(0)
for name, corners, upright in (("circle", 64, 0), ("square", 4, np.pi / 4), ("triangle", 3, np.pi / 6)):
    folder = Path("shapes", name)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(EACH):
        centre, radius, turned = rng.uniform(12, 20, 2), rng.uniform(7, 11), upright + rng.uniform(-0.3, 0.3)
        angles = turned + 2 * np.pi * np.arange(corners) / corners
        ground, ink = (tuple(int(level) for level in rng.integers(*span, 3)) for span in ((0, 110), (145, 256)))
        picture = Image.new("RGB", (SIDE, SIDE), ground)
        outline = centre + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        ImageDraw.Draw(picture).polygon([tuple(point) for point in outline.tolist()], fill=ink)
        picture.save(folder / f"{number:03}.png")
