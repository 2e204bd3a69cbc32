"""`images`: a folder of pictures, one folder per class, read with Pillow."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

import numpy as np

from cnnexp.datasets import photograph
from cnnexp.datasets.base import SEED, Dataset, Source, Split, need_images, shown
from cnnexp.errors import DataError, refused
from cnnexp.system.files import open_regular
from cnnexp.system.ranges import ranged

SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
MODES_OF_8_BITS = frozenset(("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"))
SIDE = "a whole number 1 .. 65535"  # pixels
HELD = "test", "val", "valid", "validation"  # folders beside `train`; the first one there is tested on
Labeled = tuple[Path, int]
MOST_BYTES = 2**28  # of a picture's file; a larger one is no picture to train on


@dataclass(frozen=True, kw_only=True, repr=False)
class Images(Source):
    """Pictures as uint8 (N, H, W, 3), or (N, H, W, 1) where gray.

    `root` holds a folder per class, named as the class; or it holds `train` and `test`, which hold these, and maybe
    `val` (or `valid`, `validation`) for early stop, which is tested on where there is no `test`. Files of other types
    than bmp, gif, jpeg, pgm, png, ppm, tiff and webp are left out, and so is what is hidden. Order is shuffled by seed,
    so a limit takes images of all classes. What is transparent is the ground of `flatten`. Resizing is bilinear.
    """

    name = "images"
    given: ClassVar = {"root": ("the folder that holds a folder of pictures per class", "photos")}
    root: str | None = None
    height: int | None = ranged(None, SIDE)
    width: int | None = ranged(None, SIDE)
    grayscale: bool = False
    test_fraction: float = ranged(0.2, "> 0 and < 1")
    seed: int = ranged(0, SEED)

    def load(self) -> Dataset:
        root = self._path("root")
        classes = _folders(root)
        splits = {name.lower(): root / name for name in classes if name.lower() in ("train", *HELD)}
        held_out = [splits[name] for name in HELD if name in splits]
        if "train" in splits and held_out:
            classes = _folders(splits["train"])
            train, test, *more = (_list(folder, classes) for folder in (splits["train"], *held_out))
        else:
            train, test, *more = self._hold_out(_list(root, classes))
        rng = np.random.default_rng((self.seed, 1))
        train, test, *more = ([files[i] for i in rng.permutation(len(files))] for files in (train, test, *more))
        train, test, held = self._limited(train, test)
        held = held or next(iter(more), None)
        read = self._read_all(train), self._read_all(test), self._read_all(held) if held else None
        # names that can be printed and drawn
        shown_as = tuple("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in n) for n in classes)
        return Dataset.build(self.name, *read, classes=shown_as, source=str(self.root))

    def _hold_out(self, files: list[Labeled]) -> tuple[list[Labeled], list[Labeled]]:
        """Split each class by seed, at least one picture on each side."""
        rng = np.random.default_rng((self.seed, 0))
        train, test = list[Labeled](), list[Labeled]()
        for label in sorted({label for _, label in files}):
            members = [file for file in files if file[1] == label]
            if len(members) < 2:
                raise DataError(f"{shown(members[0][0].parent)}: holds one picture; a class needs two, to be split")
            shuffled = [members[i] for i in rng.permutation(len(members))]
            held = min(max(round(self.test_fraction * len(members)), 1), len(members) - 1)
            test += shuffled[:held]
            train += shuffled[held:]
        return train, test

    def _read_all(self, files: list[Labeled]) -> Split:
        images: list[np.ndarray] = []
        need_images(len(files), (1 if self.grayscale else 3) * (self.height or 0) * (self.width or 0), "height")
        for path, _ in files:
            image = self.read(path)
            if images and image.shape != images[0].shape:
                size, first = (f"{one.shape[0]} x {one.shape[1]}" for one in (image, images[0]))
                fits = "give the size they shall have: dataset.height=... dataset.width=..."
                raise DataError(f"{shown(path)} is {size} pixels and {shown(files[0][0])} {first}; {fits}")
            if not images:
                need_images(len(files), image.nbytes, "height")
            images.append(image)
        return Split(np.stack(images), np.array([label for _, label in files], np.int32))

    def read(self, path: Path) -> np.ndarray:
        """Return a picture as uint8 (H, W, C), of the size and the channels that the fields ask for."""
        from PIL import Image

        pixels = read_picture(path, "RGBA")
        if pixels[:, :, 3].min() < 255:
            pixels = np.rint(photograph.flatten(pixels)).astype(np.uint8)
        picture = Image.fromarray(pixels).convert("L" if self.grayscale else "RGB")
        size = (self.width or picture.width, self.height or picture.height)
        if size != picture.size:
            picture = picture.resize(size, Image.Resampling.BILINEAR)
        return np.asarray(picture, np.uint8).reshape(size[1], size[0], -1)


def read_picture(path: Path, mode: str) -> np.ndarray:
    """Return a picture file as `decode_picture` does; raise DataError where it cannot be read, or as there."""
    with refused(DataError, f"{shown(path)}: cannot be read as a picture"), open_regular(path, MOST_BYTES) as file:
        return decode_picture(file, mode, shown(path))


def decode_picture(file: BinaryIO, mode: str, name: str) -> np.ndarray:
    """Return a picture, which errors call `name`, as uint8 (H, W, ...), turned as its metadata says.

    It comes in a format that Pillow knows; `mode` is Pillow's: `L`, `RGB` or `RGBA`. DataError is raised where it is no
    picture, is damaged, or has more than 8 bits a channel.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError  # only this source needs it

    with refused(DataError, f"{name}: cannot be read as a picture", ""), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd metadata, which many cameras write
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(file) as opened:
                if opened.mode not in MODES_OF_8_BITS:
                    raise DataError(f"{name}: pixels of mode {opened.mode}; convert it to 8 bits per channel")
                picture = ImageOps.exif_transpose(opened).convert(mode)
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise DataError(f"{name}: more than {Image.MAX_IMAGE_PIXELS} pixels, refused") from error
        except UnidentifiedImageError as error:
            raise DataError(f"{name}: not a picture that Pillow can read") from error
    return np.asarray(picture, np.uint8)


def _folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted; hidden ones left out."""
    with refused(DataError, f"dataset.root={shown(folder)}"), os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if len(names) < 2:
        raise DataError(f"dataset.root={shown(folder)}: holds {len(names)} folders; it needs one per class, at least 2")
    return names


def _list(folder: Path, classes: list[str]) -> list[Labeled]:
    """Return the pictures of all classes, sorted by class and name."""
    if unknown := sorted(set(_folders(folder)) - set(classes)):
        raise DataError(f"{shown(folder)}: class {unknown[0]!r} is not among the training classes {', '.join(classes)}")
    files = []
    for label, name in enumerate(classes):
        paths = [p for p in sorted((folder / name).glob("**/*")) if p.suffix.lower() in SUFFIXES]
        files += [(p, label) for p in paths if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
        if not files or files[-1][1] != label:
            raise DataError(f"{shown(folder / name)}: holds no pictures; legal: {' '.join(sorted(SUFFIXES))}")
    return files
