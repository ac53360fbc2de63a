"""Starts the expert cache in any Python that has this folder on PYTHONPATH, with no installation.

Python imports one `sitecustomize`, the first on sys.path. Where this one hides another (Debian has
one, tracers bring theirs), it then runs that one too, as if this one were not there.

Any Python that shares the environment runs this file, so it keeps to syntax that old ones parse.
"""

import os
import sys


def _start_expert_cache():
    try:
        if sys.version_info >= (3, 10):
            from expert_cache_shim import bootstrap

            bootstrap.install()
    except Exception as error:
        _report("off", error)


def _find_shadowed():
    """The spec of the next `sitecustomize` on sys.path, or None."""
    try:
        from _frozen_importlib_external import PathFinder

        here = os.path.dirname(os.path.abspath(__file__))
        folders = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
        tried = folders[: folders.index(here) + 1] if here in folders else []
        # Only folders that come after all that were tried: two copies of this file on one path
        # then run one after the other, and not each other for ever.
        untried = [folder for folder in folders if folder not in tried]
        spec = PathFinder.find_spec("sitecustomize", untried)
        # A folder of that name without an __init__.py has no loader, and nothing to run.
        return spec if spec is not None and spec.loader is not None else None
    except Exception as error:
        _report("cannot look for a sitecustomize that this one hides", error)


def _report(what, error):
    try:
        reason = " ".join(("%s: %s" % (type(error).__name__, error)).split())
        sys.stderr.write("expert cache: %s: %s (%s)\n" % (what, reason, __file__))
    except Exception:
        pass  # there is nobody to tell


_start_expert_cache()
_shadowed = _find_shadowed()
if _shadowed is not None:
    # Puts the module into sys.modules before it runs, and what it raises is for Python's own
    # `site` to report. importlib.util, which has the public way, takes milliseconds to import.
    from _frozen_importlib import _load

    _load(_shadowed)
