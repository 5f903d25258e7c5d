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

from holdfast.kubeflow.records import ended_in, is_installed, mark_installed, read_folder
from holdfast.launch import leash


def main(folder: str, arguments: list[str]) -> None:
    environment = os.path.join(folder, "venv")
    python = os.path.join(environment, "bin", "python")
    try:
        if not is_installed(folder):
            _make(folder, environment, python)
            mark_installed(folder)
        os.execv(python, [python, *arguments])
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"the packages of this job could not be installed: {error}", flush=True)
        with open(ended_in(folder), "w", encoding="utf-8") as file:
            file.write("1")
        sys.exit(1)


def _make(folder: str, environment: str, python: str) -> None:
    record = read_folder(folder)
    install = [python, "-m", "pip", "install", "--no-warn-script-location", "--disable-pip-version-check"]
    urls = record["index_urls"]
    if urls:
        install += ["--index-url", urls[0]]
        install += [part for url in urls[1:] for part in ("--extra-index-url", url)]
    _run([sys.executable, "-m", "venv", environment])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    with open(os.path.join(environment, "lib", version, "site-packages", "below.pth"), "w", encoding="utf-8") as file:
        file.writelines(f"import site; site.addsitedir({path!r})\n" for path in _below())
    _run([*install, *record["packages"]])


def _below() -> list[str]:
    """Where this interpreter has its packages: those of the user are not seen from an environment by itself."""
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]


def _run(command: list[str]) -> None:
    """Ends with this process, however that ends."""
    done = subprocess.run([sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *command], check=False)
    _checked(command, done.returncode)


def _checked(command: list[str], code: int) -> None:
    if code:
        raise ValueError(f"{' '.join(command[1:4])} ended with {code}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
