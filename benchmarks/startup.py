"""What the package adds to the start of every Python process: ``python -c pass`` with its .pth and without."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
from glob import glob

from bench import Bench, Row, in_turn, spread

LIMIT_S = 1e-3


def measure(bench: Bench) -> list[Row]:
    plain, hooked = _environment(bench.path("plain")), _environment(bench.path("hooked"))
    (site,) = glob(bench.path("hooked/lib/python*/site-packages"))
    for name in ("holdfast.pth", "_holdfast_startup.py"):
        shutil.copy(_installed(name), site)
    contestants = {
        "without": (plain, None),
        "no variable": (hooked, None),
        "HOLDFAST_ENABLED=1": (hooked, "1"),
        "HOLDFAST_ENABLED=0": (hooked, "0"),
    }
    starts = {name: _start(python, value) for name, (python, value) in contestants.items()}
    for start in starts.values():
        start()  # compiles
    times = in_turn(bench.rounds(400, 60), starts)
    rows = []
    whole = statistics.median(times["without"])
    for name in list(contestants)[1:]:
        more = [one - other for one, other in zip(times[name], times["without"], strict=True)]
        typical = statistics.median(more)
        rows.append(
            Row(
                f"interpreter start, {name}: more than without holdfast",
                f"{typical * 1e3:+.2f} ± {spread(more) * 1e3:.2f} ms of {whole * 1e3:.1f} ms",
                f"≤ {LIMIT_S * 1e3:g} ms",
                typical <= LIMIT_S,
                {"seconds": times[name], "without": times["without"]},
            )
        )
    imports = [_import_time(hooked) for _ in range(bench.rounds(50, 10))]
    rows.append(Row("of that the import of its module, as -X importtime sees it", f"{statistics.median(imports)} µs"))
    return rows


def _environment(folder: str) -> str:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return os.path.join(folder, "bin/python")


def _installed(name: str) -> str:
    for folder in sys.path:
        if os.path.exists(path := os.path.join(folder, name)):
            return path
    raise FileNotFoundError(f"{name}: install holdfast with pip into this environment")


def _start(python: str, value: str | None):
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("HOLDFAST_", "RAY_", "PYTHON"))}
    if value is not None:
        environ["HOLDFAST_ENABLED"] = value

    def start() -> None:
        _, status = os.waitpid(os.posix_spawn(python, [python, "-c", "pass"], environ), 0)
        assert status == 0

    return start


def _import_time(python: str) -> int:
    done = subprocess.run([python, "-X", "importtime", "-c", "pass"], capture_output=True, text=True, check=True)
    found = re.search(r"\|\s*(\d+) \|\s*_holdfast_startup$", done.stderr, re.MULTILINE)
    assert found is not None, done.stderr
    return int(found[1])


if __name__ == "__main__":
    import run

    sys.argv[1:1] = ["--only", "startup"]
    sys.exit(run.main())
