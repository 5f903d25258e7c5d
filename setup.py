"""What pyproject.toml cannot say: ``holdfast.pth`` goes beside the package, in a wheel and in an editable install."""

import os

from setuptools import setup
from setuptools.command.build_py import build_py

# Quiet where the package itself is gone, such as the checkout of an editable install.
PTH = 'import sys; exec("try:\\n import _holdfast_startup as s\\nexcept ImportError: pass\\nelse: s.start()")\n'


class BuildWithPth(build_py):
    def _pth(self) -> str:
        # An editable wheel holds none of what is built, only what would be installed elsewhere.
        folder = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        return os.path.join(folder, "holdfast.pth")

    def run(self) -> None:
        super().run()
        os.makedirs(os.path.dirname(self._pth()), exist_ok=True)
        with open(self._pth(), "w", encoding="utf-8") as file:
            file.write(PTH)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, self._pth()]


setup(cmdclass={"build_py": BuildWithPth})
