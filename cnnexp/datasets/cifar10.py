"""`cifar10`: 60,000 photographs of ten kinds of things (Krizhevsky 2009), 32x32, in colour: the binary version.

Format (A. Krizhevsky's CIFAR page): six files of records, each a byte for the label, then 1,024 bytes each of red,
green and blue, row by row. Nothing is unpickled, and the archive is read where it lies: nothing goes to the disk.
"""

import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from cnnexp.datasets.base import Dataset, Source, Split, shown
from cnnexp.datasets.download import fetch
from cnnexp.errors import DataError, reason_of, refused
from cnnexp.system.files import open_regular, read_regular

SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE
RECORDS = 10_000  # in each of the published files
MOST_BYTES = RECORDS * RECORD

ARCHIVE = "cifar-10-binary.tar.gz"
ARCHIVE_BYTES = 170_052_171
FOLDER = "cifar-10-batches-bin"
TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = "test_batch.bin"


@dataclass(frozen=True, kw_only=True, repr=False)
class Cifar10(Source):
    """50,000 training and 10,000 test images, uint8 (N, 32, 32, 3).

    The page gives the archive's md5 alone; the sha256 here is the one that projects which pin it, as gomlx, agree on.
    """

    root: str | None = None
    verify: bool = True

    name = "cifar10"
    mirrors = ("https://www.cs.toronto.edu/~kriz/",)
    sha256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def load(self) -> Dataset:
        if self.root is None:
            files = fetch(self.name, ARCHIVE, self.mirrors, self._read_archive, ARCHIVE_BYTES)
            source = self.mirrors[0]
        else:
            files, source = self._find(self._path("root")), str(self.root)
        train, test = [files[name] for name in TRAIN], files[TEST]
        images, labels = (np.concatenate([getattr(split, part) for split in train]) for part in ("images", "labels"))
        return self._dataset(Split(images, labels), test, self.classes, source)

    def _find(self, root: Path) -> dict[str, Split]:
        """Read the files under a folder, or the archive in it."""
        with refused(DataError, f"dataset.root={shown(self.root)}"):
            os.listdir(root)  # else one that cannot be read would seem to be empty
        for folder in (root, root / FOLDER):
            if os.path.exists(folder / TEST):  # False of a folder that may not be read
                return {name: self._read_file(folder / name) for name in (*TRAIN, TEST)}
        path = root / ARCHIVE
        if not path.exists():
            fits = "the folder that holds the files of the binary version, or dataset.root=null to download them"
            raise DataError(f"dataset.root={shown(self.root)}: holds neither {ARCHIVE} nor {TEST}; give {fits}")
        try:
            return self._read_archive(path)
        except DataError as error:
            raise DataError(f"{shown(path)}: {error}; download it again (sha256 {self.sha256})") from error

    def _read_file(self, path: Path) -> Split:
        with refused(DataError, shown(path)):
            return self._split(read_regular(path, MOST_BYTES), shown(path))

    def _read_archive(self, path: Path) -> dict[str, Split]:
        """Read the six files in an archive; other members are passed over, wherever they claim to belong."""
        try:
            with open_regular(path, ARCHIVE_BYTES) as file:
                if self.verify:
                    if (sha256 := hashlib.file_digest(cast(Any, file), "sha256").hexdigest()) != self.sha256:
                        raise DataError(f"altered or truncated: it has sha256 {sha256}")
                    file.seek(0)
                with tarfile.open(fileobj=file, mode="r:gz") as archive:
                    files = dict(self._members(archive))
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise DataError(f"damaged, or no gzipped archive: {error}") from error
        except OSError as error:
            raise DataError(reason_of(error)) from error
        if missing := [name for name in (*TRAIN, TEST) if name not in files]:
            raise DataError(f"lacks {', '.join(f'{FOLDER}/{name}' for name in missing)}")
        return files

    def _members(self, archive: tarfile.TarFile) -> Iterator[tuple[str, Split]]:
        wanted = {f"{FOLDER}/{name}": name for name in (*TRAIN, TEST)}
        for member in archive:
            if member.size > MOST_BYTES:
                name = member.name[:80]
                raise DataError(f"{name!r} in it has {member.size} bytes, more than the {MOST_BYTES} of a file")
            if member.name in wanted and member.isreg():
                file = archive.extractfile(member)
                yield wanted[member.name], self._split(file.read() if file else b"", f"{member.name} in it")

    def _split(self, content: bytes, where: str) -> Split:
        if not content or len(content) % RECORD:
            size = len(content)
            raise DataError(f"{where}: truncated or altered: {size} bytes are no whole number of records of {RECORD}")
        records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
        if self.verify and len(records) != RECORDS:
            found = f"holds {len(records)} images, the published one {RECORDS}"
            raise DataError(f"{where}: {found}; dataset.verify=false takes it")
        planes = records[:, 1:].reshape(-1, 3, SIDE, SIDE)
        return Split(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0].astype(np.int32))
