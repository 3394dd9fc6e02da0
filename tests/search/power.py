"""What a disk holds after a loss of power: by what was synced, at every change of a file.

A file keeps the bytes of its last fsync, and a folder its names of its last fsync. Between two of
them a file system is free, so that two disks are made of every moment:

    ahead    names are as they were, bytes only as they were synced: empty files under new names
    behind   names too are only as they were synced: what was not listed then is not there

Run in the process that is watched (`children.Child`), with `os.fsync` observed.
"""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

READ = os.O_RDONLY | os.O_NONBLOCK


@dataclass
class Power:
    """Write the two disks of some moments: `images/NUMBER/ahead`, `images/NUMBER/behind`."""

    root: Path
    """Folder that is on the disk; whatever is above it is there."""
    images: Path
    moments: frozenset[int]
    """Numbers of changes, before each of which power is lost."""
    bytes_of: dict[int, bytes] = field(default_factory=dict)
    names_of: dict[int, dict[str, int]] = field(default_factory=dict)
    is_folder: dict[int, bool] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    """When each file was, in ns, as a file system keeps it."""

    def __call__(self, number: int) -> None:
        """Hear of a change, and watch syncs from the first one on."""
        if number == 1:
            self._keep_all()
            os.fsync = self._watched(os.fsync)
        if number in self.moments:
            self._write(self.images / str(number))

    def _watched(self, fsync: Callable[[int], None]) -> Callable[[int], None]:
        def synced(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if self.root not in (path, *path.parents):
                return
            if path.is_dir():
                self._keep_names(path)
            else:
                self.bytes_of[self._number(path)] = path.read_bytes()

        return synced

    def _number(self, path: Path) -> int:
        """Return a file's number; it is held open, so that no other gets the same."""
        descriptor = os.open(path, READ)
        found = os.fstat(descriptor)
        if found.st_ino in self.is_folder:
            os.close(descriptor)
        self.is_folder[found.st_ino] = stat.S_ISDIR(found.st_mode)
        self.written[found.st_ino] = found.st_mtime_ns
        return found.st_ino

    def _keep_all(self) -> None:
        """Take what lies there already as synced."""
        for folder in (self.root, *(each for each in self.root.rglob("*") if each.is_dir())):
            self._keep_names(folder)
            for file in folder.iterdir():
                if not file.is_dir():
                    self.bytes_of[self._number(file)] = file.read_bytes()

    def _put(self, number: int, to: Path) -> None:
        to.write_bytes(self.bytes_of.get(number, b""))
        os.utime(to, ns=(0, self.written.get(number, 0)))

    def _keep_names(self, folder: Path) -> None:
        listed = {each.name: self._number(each) for each in folder.iterdir()}
        self.names_of[self._number(folder)] = listed

    def _write(self, image: Path) -> None:
        for name in ("ahead", "behind"):
            (image / name).mkdir(parents=True)
        self._write_ahead(self.root, image / "ahead")
        self._write_behind(self._number(self.root), image / "behind")

    def _write_ahead(self, folder: Path, to: Path) -> None:
        for each in folder.iterdir():
            if each.is_dir():
                (to / each.name).mkdir()
                self._write_ahead(each, to / each.name)
            else:
                self._put(self._number(each), to / each.name)

    def _write_behind(self, number: int, to: Path) -> None:
        for name, each in self.names_of.get(number, {}).items():
            if self.is_folder[each]:
                (to / name).mkdir()
                self._write_behind(each, to / name)
            else:
                self._put(each, to / name)
