"""buildah with a store of its own, which is gone afterwards: nothing of the user's is touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Store:
    """Images and containers below one folder. `driver`: overlay, or vfs where the kernel cannot
    (whole copies of every layer, so slower)."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.options = ["--root", str(folder / "root"), "--runroot", str(folder / "run")]
        self.driver = "overlay"
        if self._call("info", check=False).returncode != 0:
            shutil.rmtree(folder / "root", ignore_errors=True)
            self.driver = "vfs"

    def command(self, *words: str) -> list[str]:
        return ["buildah", *self.options, "--storage-driver", self.driver, *words]

    def _call(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {"BUILDAH_ISOLATION": "chroot"}
        done = subprocess.run(self.command(*words), env=environ, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"buildah {words}:\n{done.stdout}{done.stderr}"
        return done

    def call(self, *words: str) -> str:
        """What a buildah command prints; AssertionError with all it said where it fails."""
        return self._call(*words).stdout.strip()

    def refusal(self, *words: str) -> str:
        """All that a command says that has to fail."""
        done = self._call(*words, check=False)
        assert done.returncode != 0, f"buildah {words} did not fail:\n{done.stdout}"
        return done.stdout + done.stderr

    def config(self, image: str) -> dict:
        """What an image tells its containers: entrypoint, user, labels and so on."""
        return json.loads(self.call("inspect", "--type", "image", image))["OCIv1"]["config"]

    @contextmanager
    def container(self, image: str) -> Iterator[str]:
        name = self.call("from", "--pull-never", image)
        try:
            yield name
        finally:
            self.call("rm", name)

    @contextmanager
    def tree(self, container: str) -> Iterator[Path]:
        """The files of a container."""
        place = Path(self.call("mount", container))
        try:
            yield place
        finally:
            self.call("umount", container)

    def remove(self) -> None:
        self._call("rm", "--all", check=False)
        self._call("rmi", "--all", "--force", check=False)
        # overlay keeps its store mounted on itself.
        subprocess.run(["umount", str(self.folder / "root" / "overlay")], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)
