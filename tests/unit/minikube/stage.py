"""The scripts of deploy/minikube with stand-ins for the tools that they call."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit import ROOT

SCRIPTS = ROOT / "deploy/minikube"
TOOLS = ("minikube", "kubectl", "helm", "docker")
PLAIN = (
    *("awk", "basename", "bash", "cat", "chmod", "cp", "date", "dirname", "env", "grep", "head", "kill", "mkdir"),
    *("mktemp", "mv", "rm", "sed", "sh", "sleep", "sort", "tail", "tar", "tee", "wc"),
)
"""All else that the scripts may call."""


@dataclass
class Done:
    code: int
    output: str
    errors: str
    calls: list[list[str]]

    @property
    def lines(self) -> list[str]:
        return [" ".join(call) for call in self.calls]

    def place(self, *words: str) -> int:
        """Of the first call with all of these words."""
        for number, call in enumerate(self.calls):
            if all(word in call for word in words):
                return number
        raise AssertionError(f"no call with {words}:\n" + "\n".join(self.lines))

    def called(self, *words: str) -> int:
        """How often."""
        return sum(all(word in call for word in words) for call in self.calls)


class Stage:
    """Where the scripts run: nothing in PATH but the stand-ins and what every machine has."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.state = folder, folder / "bin", folder / "state"
        self.bin.mkdir()
        self.state.mkdir()
        for name in PLAIN:
            found = shutil.which(name)
            assert found, name
            (self.bin / name).symlink_to(found)
        text = (Path(__file__).with_name("stand_in.py")).read_text()
        for tool in TOOLS:
            (self.bin / tool).write_text(f"#!{sys.executable} -IS\n{text}")
            (self.bin / tool).chmod(0o755)

    def tell(self, name: str, content: Any) -> None:
        """What the stand-ins find; see stand_in.py."""
        (self.state / f"{name}.json").write_text(json.dumps(content))

    def fail(self, *words: str, times: int = 99, message: str = "it does not work") -> None:
        self.tell("failing", [{"words": words, "times": times, "message": message}])

    def remove(self, tool: str) -> None:
        (self.bin / tool).unlink()

    def run(self, script: str, *arguments: str, **environ: str) -> Done:
        (self.state / "calls.jsonl").write_text("")
        ours = {"PATH": str(self.bin), "HOME": str(self.folder), "STAND_INS": str(self.state), "RETRY_DELAY_S": "0"}
        ours |= {"SHARED": str(self.folder / "shared"), "RESULTS": str(self.folder / "results"), "POLL_S": "0.1"}
        if path := os.environ.get("TMPDIR"):
            ours["TMPDIR"] = path
        done = subprocess.run(
            ["bash", str(SCRIPTS / script), *arguments],
            env=ours | environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        calls = [json.loads(line) for line in (self.state / "calls.jsonl").read_text().splitlines()]
        return Done(done.returncode, done.stdout, done.stderr, calls)
