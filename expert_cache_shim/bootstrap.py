"""What every Python process of a machine that has the shim runs at start: as little as can be.

`expert_cache_shim.pth` or `sitecustomize.py` calls `install`, which only puts one meta-path finder
in place. All the rest (wrapt alone takes tens of milliseconds to import) waits until the process
imports vLLM, which most processes never do. Nothing here may stop an interpreter or an import:
a failure is one line of log, and vLLM then serves without the cache.
"""

import os
import sys

# Outlives importlib.reload, which runs this file again in the same namespace.
_installed = globals().get("_installed", False)
# Holds one item until the hooks are registered. list.pop is atomic: of several threads that meet
# the name "vllm" at the same time, one registers.
_registration_due = [True]


def install():
    """Waits for vLLM, or registers the hooks at once where it is imported already. Idempotent.

    A venv needs that: it runs a .pth file twice. Does nothing under `EXPERT_CACHE_DISABLE=1`; any
    other value of it is for `settings` to accept or to complain of, in a process that is vLLM.
    """
    global _installed
    if _installed or os.environ.get("EXPERT_CACHE_DISABLE", "").strip() == "1":
        return
    _installed = True
    if sys.modules.get("vllm") is not None:
        _register_hooks()
    else:
        sys.meta_path.insert(0, VllmWatch())


class VllmWatch:
    """A meta-path finder that finds nothing: it learns that vLLM is about to be imported."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "vllm":
            self._retire()
            _register_hooks()
        return None  # and so the search goes on

    def _retire(self):
        # A new list, as this very import and those of other threads are walking the old one:
        # removing from it would make each of them skip a finder.
        finders = sys.meta_path.copy()
        if self in finders:
            finders.remove(self)
            sys.meta_path = finders


def _register_hooks():
    try:
        _registration_due.pop()
    except IndexError:
        return
    try:
        from expert_cache_shim import hooks

        hooks.register()
    except Exception as error:
        _report(error)


def _report(error):
    """One line about `error`, with its traceback where the logger is set to DEBUG."""
    if isinstance(error, ModuleNotFoundError) and error.name == "wrapt":
        reason = "the package wrapt is missing, `pip install wrapt` adds it"
    else:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
    line = f"expert cache: off, vLLM serves without it: {reason}"
    try:
        _log(line, error)
    except Exception:
        try:
            sys.stderr.write(line + "\n")
        except Exception:
            pass  # there is nobody to tell


def _log(line, error):
    import logging

    # By its name: what failed may be the package itself.
    logger = logging.getLogger("vllm.expert_cache")
    logger.error(line, exc_info=error if logger.isEnabledFor(logging.DEBUG) else None)
