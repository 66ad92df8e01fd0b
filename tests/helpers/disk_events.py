"""What is asked of the disk, in order: proves that a name stands for bytes that are there."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest


class DiskEvents:
    """Records ("sync", path), ("write", path), ("name", path), ("remove", path) of files under a
    folder. "name": a file got this name by a rename; its own records move with it.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.log = folder, list[tuple[str, str]]()
        fsync, replace, pwrite, rmtree = os.fsync, os.replace, os.pwrite, shutil.rmtree
        copyfile = shutil.copyfile

        def seen_fsync(descriptor: int) -> None:
            fsync(descriptor)
            self._add("sync", os.readlink(f"/proc/self/fd/{descriptor}"))

        def seen_pwrite(descriptor: int, *given: Any) -> int:
            self._add("write", os.readlink(f"/proc/self/fd/{descriptor}"))
            return pwrite(descriptor, *given)

        def seen_replace(source: Any, target: Any) -> None:
            replace(source, target)
            self._add("from", source)
            self._add("name", target)

        def seen_copyfile(source: Any, target: Any, **given: Any) -> Any:
            self._add("write", target)
            return copyfile(source, target, **given)

        def seen_rmtree(path: Any, *given: Any, **named: Any) -> None:
            rmtree(path, *given, **named)
            self._add("remove", path)

        monkeypatch.setattr(os, "fsync", seen_fsync)
        monkeypatch.setattr(os, "pwrite", seen_pwrite)
        monkeypatch.setattr(os, "replace", seen_replace)
        monkeypatch.setattr(shutil, "copyfile", seen_copyfile)
        monkeypatch.setattr(shutil, "rmtree", seen_rmtree)

    def _add(self, what: str, path: Any) -> None:
        if Path(path).is_relative_to(self.folder):
            self.log.append((what, str(Path(path).relative_to(self.folder))))

    @property
    def named(self) -> list[str]:
        """Files in the order in which they got their names."""
        return [path for what, path in self.log if what == "name"]

    def require_safe(self) -> None:
        """Each file under its own name came by a rename, was on the disk before it, was not written
        after that, and its folder was put on the disk next.
        """
        for place, (what, path) in enumerate(self.log):
            if what != "name":
                continue
            what, partial = self.log[place - 1]
            assert what == "from" and partial != path
            before = [w for w, p in self.log[:place] if p == partial and w in ("write", "sync")]
            assert before and before[-1] == "sync", f"{path} has its name before its bytes"
            folder, later = str(Path(path).parent), self.log[place + 1 :]
            assert later[:1] == [("sync", folder)], f"the name of {path} may be lost"
        names = set(self.named)
        written = {path for what, path in self.log if what == "write" and path in names}
        assert not written, f"{written} were written under their own names"
