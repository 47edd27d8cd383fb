"""Leases: which driver executes which run, where several share a store.

A lease is a file that only one process can create, and that it touches as long as its run goes on. A driver that was
killed stops touching its leases; they expire, and another takes the runs. Leases that nobody wants are deleted after a
day.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final
from uuid import uuid4

from cprop_lab.store import Store

__all__ = ["ELSEWHERE", "EXPIRY", "Leases"]

EXPIRY: Final = 60.0
"""Seconds after which a lease that was not refreshed is anybody's."""
LITTER: Final = 24 * 3600.0
"""Seconds after which a lease is deleted, whoever had it."""
ELSEWHERE: Final = "waiting for runs that another command has leased; it loses them a minute after it was killed"
"""What a driver waits for if only leased runs are left."""


class Leases:
    """The leases of one driver, refreshed by a thread.

    In an object store every run can be had: pyarrow has no request that creates an object only if there is none. Two
    drivers may then execute the same run, and both store the same result.

    Args:
        store: where results are kept.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Leases(Store(folder)) as ours:
        ...     with Leases(Store(folder)) as theirs:
        ...         ours.take("a run"), theirs.take("a run"), theirs.take("another")
        (True, False, True)
    """

    def __init__(self, store: Store) -> None:
        self.folder = store.local("leases")
        self._held: set[Path] = set()
        self._seen: dict[
            Path, tuple[float, float]
        ] = {}  # others' leases: when touched, by their clock; noticed, by ours
        self._lock, self._over = threading.Lock(), threading.Event()

    def __enter__(self) -> Leases:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.iterdir():
                with suppress(FileNotFoundError):  # another driver was quicker
                    if time.time() - path.stat().st_mtime > LITTER:
                        path.unlink()
            threading.Thread(target=self._refresh, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        with self._lock:
            for path in self._held:
                path.unlink(missing_ok=True)

    def _refresh(self) -> None:
        while not self._over.wait(EXPIRY / 4):
            with self._lock:
                for path in self._held:
                    with suppress(OSError):  # the next time may succeed; this thread must not end before its driver
                        os.utime(path)

    def take(self, name: str) -> bool:
        """Lease a run, unless another driver has it."""
        if self.folder is None:
            return True
        path = self.folder / name
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            with suppress(FileNotFoundError):
                if not self._expired(path):
                    return False
                # Of several that see it expired, one can move it away.
                aside = path.with_name(f".{uuid4().hex}")
                path.rename(aside)
                aside.unlink()
                return self.take(name)
            return False  # another was quicker, or it has just ended: look again later
        with self._lock:
            self._held.add(path)
        return True

    def _expired(self, path: Path) -> bool:
        """Whether a lease's driver has stopped touching it; its clock may be ahead of ours."""
        touched, now = path.stat().st_mtime, time.monotonic()
        if self._seen.get(path, (None, now))[0] != touched:
            self._seen[path] = touched, now
        return time.time() - touched >= EXPIRY or now - self._seen[path][1] >= EXPIRY

    def release(self, name: str) -> None:
        """Give a run back, or say that it has ended."""
        if self.folder is not None:
            path = self.folder / name
            with self._lock:
                self._held.discard(path)
            path.unlink(missing_ok=True)
