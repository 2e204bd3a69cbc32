import os
import time

from cnnexp.system import files


def test_what_killed_processes_left_goes_once_nobody_can_be_making_it(tmp_path):
    (tmp_path / "kept.bin").write_bytes(b"")
    for name in ("old", "new"):
        (tmp_path / f"{name}.tmp").write_bytes(b"half")
        (tmp_path / f"{name}-folder.tmp").mkdir()
        (tmp_path / f"{name}-folder.tmp" / "part").write_bytes(b"half")
    long_ago = time.time() - 2 * files.LEFT_S
    for name in ("old.tmp", "old-folder.tmp", "kept.bin"):
        os.utime(tmp_path / name, (long_ago, long_ago))
    files.remove_leftovers(tmp_path, "*.tmp")
    assert {path.name for path in tmp_path.iterdir()} == {"kept.bin", "new.tmp", "new-folder.tmp"}
