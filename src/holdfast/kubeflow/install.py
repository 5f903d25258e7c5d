"""``python -m holdfast.kubeflow.install FOLDER ARGUMENTS``: what a local job needs, then its launcher, in one process.

It makes the environment of the job in FOLDER, with its packages and all that this interpreter has, and becomes ``python
ARGUMENTS`` of that. So a job whose packages are being installed has a process that can be found and ended, and goes on
without the one that submitted it.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from collections.abc import Mapping

from holdfast.kubeflow.records import INDEX_URLS, ended_in, is_installed, mark_installed, read_folder
from holdfast.launch import leash


def main(folder: str, arguments: list[str]) -> None:
    environment = os.path.join(folder, "venv")
    python = os.path.join(environment, "bin", "python")
    urls = os.environ.pop(INDEX_URLS, "").splitlines()
    try:
        if not is_installed(folder):
            _make(folder, environment, python, urls)
            mark_installed(folder)
        os.execv(python, [python, *arguments])
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"the packages of this job could not be installed: {error}", flush=True)
        with open(ended_in(folder), "w", encoding="utf-8") as file:
            file.write("1")
        sys.exit(1)


def _make(folder: str, environment: str, python: str, urls: list[str]) -> None:
    record = read_folder(folder)
    install = [python, "-m", "pip", "install", "--no-warn-script-location", "--disable-pip-version-check"]
    # Not as arguments, which every user of this machine can read.
    indexes = {"PIP_INDEX_URL": urls[0]} if urls else {}
    if urls[1:]:
        indexes["PIP_EXTRA_INDEX_URL"] = " ".join(urls[1:])
    _run([sys.executable, "-m", "venv", environment])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    with open(os.path.join(environment, "lib", version, "site-packages", "below.pth"), "w", encoding="utf-8") as file:
        file.writelines(f"import site; site.addsitedir({path!r})\n" for path in _below())
    _run([*install, *record["packages"]], indexes)


def _below() -> list[str]:
    """Where this interpreter has its packages: those of the user are not seen from an environment by itself."""
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]


def _run(command: list[str], variables: Mapping[str, str] | None = None) -> None:
    """Ends with this process, however that ends."""
    leashed = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *command]
    done = subprocess.run(leashed, env={**os.environ, **(variables or {})}, check=False)
    _checked(command, done.returncode)


def _checked(command: list[str], code: int) -> None:
    if code:
        raise ValueError(f"{' '.join(command[1:4])} ended with {code}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
