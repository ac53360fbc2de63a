"""Puts expert_cache_shim.pth at the top of site-packages, for which setup.cfg has no word.

Everything else is in setup.cfg.
"""

import os

from setuptools import Command, setup
from setuptools.command.build import build


class build_start_up_hook(Command):
    """A sub-command of `build`, by the protocol of `setuptools.command.build.SubCommand`."""

    description = "copy the .pth file that starts the shim"
    user_options = []
    editable_mode = False
    hook = "expert_cache_shim.pth"

    def initialize_options(self):
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self):
        # An editable wheel leaves build_lib behind. It takes what lies where `install` would put
        # it, beside the file that points to the source tree.
        folder = self.build_lib
        if self.editable_mode:
            folder = self.get_finalized_command("install").install_lib
        self.mkpath(folder)
        self.copy_file(self.hook, folder)

    def get_source_files(self):
        return [self.hook]

    def get_outputs(self):
        return [] if self.editable_mode else [os.path.join(self.build_lib, self.hook)]

    def get_output_mapping(self):
        return {}


class build_with_start_up_hook(build):
    sub_commands = [*build.sub_commands, ("build_start_up_hook", None)]


setup(
    cmdclass={"build": build_with_start_up_hook, "build_start_up_hook": build_start_up_hook},
)
