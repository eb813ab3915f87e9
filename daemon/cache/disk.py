"""What the cache asks of the file system, one method for each kind of call, so that tests can make any of them fail.

Owns nothing but the calls. Names are relative to a directory's descriptor. Everything may raise OSError.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from typing import Any

from syshaxd.core import Core


class Disk:
    """The real one. `step` is called before each call with its kind."""

    def step(self, kind: str) -> None:
        pass

    def make_directory(self, name: str, at: int) -> int:
        """A new one, for this user alone; gives its descriptor."""
        self.step("mkdir")
        os.mkdir(name, 0o700, dir_fd=at)
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)

    def create(self, name: str, at: int, size: int) -> int:
        """A new file of that size (which the file system need not have reserved), open for reading and writing."""
        self.step("create")
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
        try:
            os.truncate(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def copy(self, core: Core, source: int, target: int, offset: int, size: int) -> list[int]:
        """core.copy_packed"""
        self.step("copy")
        return core.copy_packed(source, target, offset, size)

    def write(self, name: str, at: int, data: bytes) -> None:
        """A small file, whole and on the disk."""
        descriptor = self.create(name, at, 0)
        try:
            self.step("write")
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def sync(self, descriptor: int) -> None:
        self.step("sync")
        os.fsync(descriptor)

    def rename(self, old: str, new: str, at: int) -> None:
        self.step("rename")
        os.rename(old, new, src_dir_fd=at, dst_dir_fd=at)

    def remove(self, name: str, at: int) -> None:
        """A directory with all that is in it; what somebody else removes meanwhile is no error."""
        self.step("remove")
        shutil.rmtree(name, onerror=_unless_gone, dir_fd=at)

    def space(self, at: int) -> tuple[int, int]:
        """(free for this user, size) of the file system in bytes."""
        self.step("space")
        status = os.statvfs(at)
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def _unless_gone(function: Any, path: str, found: tuple[Any, BaseException, Any]) -> None:
    if not isinstance(found[1], FileNotFoundError):
        raise found[1]


def lock(descriptor: int, exclusive: bool, wait: bool = False) -> bool:
    """flock; False: somebody else's lock is in the way."""
    operation = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    return True
