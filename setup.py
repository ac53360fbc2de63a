"""Puts into the wheel what lies outside the package, for which setup.cfg has no word.

`expert_cache_shim.pth` goes to the top of site-packages, and the kernel sources go into the
package, for `expert-cache build`. Everything else is in setup.cfg.
"""

import os
from glob import glob

from setuptools import Command, setup
from setuptools.command.build import build

HOOK = "expert_cache_shim.pth"
SOURCES = sorted(path for path in glob("hip/*") if os.path.isfile(path))


class build_outside_files(Command):
    """A sub-command of `build`, by the protocol of `setuptools.command.build.SubCommand`."""

    description = "copy the .pth file that starts the shim, and the kernel sources"
    user_options = []
    editable_mode = False

    def initialize_options(self):
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self):
        # An editable wheel leaves build_lib behind. It takes what lies where `install` would put
        # it, beside the file that points to the source tree, where the sources are as well.
        folder = self.build_lib
        if self.editable_mode:
            folder = self.get_finalized_command("install").install_lib
        self.mkpath(folder)
        self.copy_file(HOOK, folder)
        if not self.editable_mode:
            for source, copy in self._source_copies().items():
                self.mkpath(os.path.dirname(copy))
                self.copy_file(source, copy)

    def _source_copies(self):
        return {path: os.path.join(self.build_lib, "expert_cache_shim", path) for path in SOURCES}

    def get_source_files(self):
        return [HOOK, *SOURCES]

    def get_outputs(self):
        if self.editable_mode:
            return []
        return [os.path.join(self.build_lib, HOOK), *self._source_copies().values()]

    def get_output_mapping(self):
        return {}


class build_with_outside_files(build):
    sub_commands = [*build.sub_commands, ("build_outside_files", None)]


setup(
    cmdclass={"build": build_with_outside_files, "build_outside_files": build_outside_files},
)
