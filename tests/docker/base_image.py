"""A base image like those that serve with vLLM, from Debian and this machine's CPU build of vLLM.

Its Python is Debian's. vLLM itself, gigabytes, stays outside of the layers: a `.pth` in the base
names a folder on which the site-packages of the virtual environment is mounted. The base has a
user, an entrypoint, labels and a PYTHONPATH of its own, so that losing one would be seen.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from buildah import Store

ENGINE = Path("/opt/engine")
USER = 1234
SUITES = {"3.11": "bookworm"}  # Debian releases by their Python

VLLM_SCRIPT = """\
#!/usr/bin/python3
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":  # or engine processes, which are spawned, would serve as well
    sys.exit(main())
"""
CONFIG = (
    "--entrypoint", '["vllm", "serve"]', "--cmd", "--help", "--user", str(USER),
    "--label", "maintainer=the base", "--env", "PYTHONPATH=/opt/base-path",
    "--env", "HOME=/srv/serve", "--env", "PATH=/usr/local/bin:/usr/bin:/bin",
    "--workingdir", "/srv/serve", "--port", "8000",
)  # fmt: skip


def make_debian(suite: str, archive: Path) -> None:
    """A Debian with Python and what vLLM's CPU build links to, as a tar; needs root and a
    mirror of Debian."""
    packages = "--include=python3,libnuma1"
    command = ["mmdebstrap", "--mode=root", "--variant=minbase", packages, suite]
    done = subprocess.run([*command, str(archive)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def make_base(store: Store, archive: Path, image: str) -> None:
    container = store.call("from", "scratch")
    store.call("add", container, str(archive), "/")
    with store.tree(container) as root:
        home = root / "srv" / "serve"
        for folder in (home, root / ENGINE.relative_to("/"), root / "opt" / "base-path"):
            folder.mkdir(parents=True)
        home.chmod(0o777)
        with (root / "etc" / "passwd").open("a") as users:
            users.write(f"serve:x:{USER}:{USER}::/srv/serve:/bin/sh\n")
        (site_packages,) = root.glob("usr/local/lib/python3.*/dist-packages")
        (site_packages / "engine.pth").write_text(f"{ENGINE}\n")
        (root / "etc" / "hosts").touch()  # a mount point, which buildah makes where it is missing
        script = root / "usr" / "local" / "bin" / "vllm"
        script.write_text(VLLM_SCRIPT)
        script.chmod(0o755)
    store.call("config", *CONFIG, container)
    store.call("commit", "--identity-label=false", "--rm", container, image)
