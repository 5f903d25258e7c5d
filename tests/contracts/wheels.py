"""Wheels of frameworks, unpacked and never installed: their source is all that a contract needs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

MADE_FOR = {
    "torch": ("macosx_14_0_arm64", "macosx_11_0_arm64"),
    "ray": ("macosx_14_0_arm64", "macosx_12_0_arm64"),
}
"""Where the wheels for Linux weigh ten times as much as those for another system: the Python in them is the same."""


class NotDownloadedError(RuntimeError):
    """The package index cannot be reached, or has no such version."""


def unpacked(distribution: str, version: str | None, folder: Path) -> tuple[str, Path]:
    """Version and folder of the Python files of a wheel; ``version`` None: of the newest release."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    named = f"{distribution}=={version}" if version else distribution
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(wheels), "--disable-pip-version-check", "--no-cache-dir"]
    if distribution in MADE_FOR:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        command += ["--python-version", python]
        command += [word for platform in MADE_FOR[distribution] for word in ("--platform", platform)]
    done = subprocess.run([*command, named], capture_output=True, text=True, check=False, timeout=240)
    (wheel,) = wheels.glob("*.whl") if done.returncode == 0 else [None]
    if wheel is None:
        raise NotDownloadedError(f"pip cannot download {named}: {done.stderr.strip().splitlines()[-1:]}")
    found = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        # Shared libraries are told by name alone.
        for entry in archive.infolist():
            if entry.filename.endswith((".py", ".dist-info/METADATA")):
                archive.extract(entry, folder)
            elif entry.filename.endswith((".so", ".dylib")):
                path = folder / entry.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
    wheel.unlink()
    return found, folder
