"""Somebody's repository and a manifest: the battery runs it; what is wrong in a manifest is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import ROOT
from tests.strangers.checkout import MANIFESTS, commit_of, find
from tests.strangers.checkout_manifest import ManifestError, owner_and_name, read

SCRIPT = """
import sys
import torch

torch.manual_seed(0)
x = torch.load("data.pt")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
for step in range(int(sys.argv[1])):
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.6f}")
torch.save(model.state_dict(), "model.pt")
"""
DATA = "import sys, torch; torch.save(torch.arange(32.0).view(8, 4) / 32, sys.argv[1])"
MANIFEST = """
repository = "https://example.org/ann/straight-line"

[[row]]
name = "line"
folder = "training"
command = "python train.py 40"
prepare = ["make_data.py data.pt"]
lines = "^step "
"""
PAGE = """Before.

<!-- sums of results -->
<!-- end of sums -->

<!-- results of ann/straight-line -->
<!-- end of results -->
"""


def checkout(folder: Path) -> Path:
    """A git repository with a script that trains, and beside it a manifest and what makes its data."""
    made = folder / "straight-line"
    (made / "training").mkdir(parents=True)
    (made / "training" / "train.py").write_text(SCRIPT)
    (made / ".gitignore").write_text("runs/\n")
    (made / "runs").mkdir()
    (made / "runs" / "large.bin").write_bytes(bytes(1 << 20))
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=Ann", "-c", "user.email=ann@example.org", "commit", "-qm", "A line"],
        ["remote", "add", "origin", "https://example.org/ann/straight-line.git"],
    ):
        git(made, *command)
    (folder / "make_data.py").write_text(DATA)
    (folder / "manifest.toml").write_text(MANIFEST)
    return made


def git(folder: Path, *command: str) -> None:
    subprocess.run(["git", "-C", folder, *command], check=True)


def battery(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.strangers.checkout", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.core
def test_a_checkout_is_run_and_its_result_stands_in_a_table(tmp_path):
    made = checkout(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    manifest, kept = tmp_path / "manifest.toml", tmp_path / "kept"
    done = battery(made, "--manifest", manifest, "--table", "--page", page, "--keep", kept)
    assert done.returncode == 0, done.stdout + done.stderr
    line = "| `line` | in training: `train.py 40` | exact |"
    for text in (done.stdout, page.read_text()):
        assert f"`{commit_of(made)}`" in text
        assert line in text.splitlines()
    assert page.read_text().startswith("Before.\n")
    assert "\n1 rows of 1 repositories: 1 exact (100%). 0 more are listed, not run.\n" in page.read_text()
    assert not (made / "training" / "data.pt").exists(), "it ran in the checkout"
    assert not (kept / "line" / "off" / "runs").exists(), "what git ignores is copied"


STARTER = """
import subprocess, sys
while (code := subprocess.call([sys.executable, "train.py", "400"])) == 143:
    print("again", flush=True)
sys.exit(code)
"""
WORKERS = """
repository = "https://example.org/ann/straight-line"

[defaults]
folder = "training"
prepare = ["make_data.py data.pt"]
worker = "train[.]py 400"
lines = "^step "
unordered = true  # a replay prints lines again

[[row]]
name = "started_again"
command = "starter.py"
at_line = "^step 60:"
"""


def test_the_signal_goes_to_a_worker_that_its_command_starts_again(tmp_path):
    made = checkout(tmp_path)
    (made / "training" / "starter.py").write_text(STARTER)
    (tmp_path / "workers.toml").write_text(WORKERS)
    done = battery(made, "--manifest", tmp_path / "workers.toml", "--keep", tmp_path / "kept")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = (tmp_path / "kept" / "started_again" / "interrupted-0.logs-1" / "log.printed-0").read_text()
    assert printed.splitlines().count("again") == 1


ROW = '[[row]]\nname = "a"\ncommand = "a.py"\n'
BAD = {
    "no row": ('repository = "x/y"', "has no [[row]]"),
    "no TOML": ("[[row", "is not TOML"),
    "field": (ROW + "speed = 3", "row 1 ('a'): no field 'speed' (= 3); accepted: name,"),
    "top field": ('url = "x"\n' + ROW, "no field 'url' (= 'x'); accepted: repository"),
    "verdict": (
        ROW + 'verdict = "exakt"',
        "row 1 ('a'): 'verdict' is 'exakt'; accepted: exact, inexact, unprotected",
    ),
    "says": (ROW + 'verdict = "unprotected"', "'says' is missing"),
    "no command": ('[[row]]\nname = "a"', "row 1 ('a'): 'command' is missing; what follows 'python'"),
    "no name": ('[[row]]\ncommand = "a.py"', "row 1: 'name' is missing"),
    "name": ('[[row]]\nname = "a b"\ncommand = "a.py"', "'name' is 'a b'; accepted: letters"),
    "twice": (ROW * 2, "'name' is 'a' in 2 rows"),
    "command": ('[[row]]\nname = "a"\ncommand = "a.py \'b"', "'command' is \"a.py 'b\"; accepted"),
    "lines": (ROW + 'lines = "("', "'lines' is '('; accepted: a regular expression"),
    "folder": (ROW + 'folder = "../b"', "'folder' is '../b'; accepted: a path inside"),
    "limit": (ROW + "limit_s = -1", "'limit_s' is -1; accepted: seconds, more than 0"),
    "steps": (ROW + "steps = [1]", "'steps' is [1]; accepted: two numbers between 0 and 1"),
    "env": (ROW + "env = { A = 1 }", "'env' is {'A': 1}; accepted: a table of texts"),
    "prepare": (ROW + 'prepare = "b.py"', "'prepare' is 'b.py'; accepted: a list"),
    "defaults": ('[defaults]\nname = "a"\n' + ROW, "[defaults]: no field 'name' (= 'a')"),
}


@pytest.mark.parametrize(("text", "said"), BAD.values(), ids=BAD)
def test_what_is_wrong_in_a_manifest_is_named(tmp_path, text, said):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ManifestError) as error:
        read(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_a_bad_manifest_ends_the_command_with_its_error_alone(tmp_path):
    (tmp_path / "bad.toml").write_text("[[row]]\n")
    done = battery(tmp_path, "--manifest", tmp_path / "bad.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"{tmp_path}/bad.toml, row 1: 'name' is missing; letters, digits, '_', '-' and '.'"
    ]


def test_a_manifest_is_found_by_the_origin_or_by_the_name_of_the_folder(tmp_path):
    made = checkout(tmp_path)
    with pytest.raises(ManifestError, match=r"no manifest for .*straight-line: it has no strangers\.toml"):
        find(made)
    subprocess.run(
        ["git", "-C", made, "remote", "set-url", "origin", "git@example.org:Karpathy/nanoGPT.git"], check=True
    )
    assert find(made) == MANIFESTS / "nanoGPT.toml"
    (tmp_path / "minGPT").mkdir()
    assert find(tmp_path / "minGPT") == MANIFESTS / "minGPT.toml"
    (made / "strangers.toml").write_text(MANIFEST)
    assert find(made) == made / "strangers.toml"
    assert find(made, MANIFESTS / "minGPT.toml") == MANIFESTS / "minGPT.toml"


def test_an_address_is_shown_as_owner_and_name():
    for address in ("https://host/a/b", "https://host/a/b.git", "git@host:a/b.git", "/srv/git/a/b/", "a/b"):
        assert owner_and_name(address) == "a/b"


@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_known_manifests_can_be_read_and_have_their_data(path):
    for entry in read(path).entries:
        for command in entry.row.prepare:
            assert command[0].startswith(("/", "data/shakespeare_char/")), (
                f"{entry.row.name}: {command[0]} is not there"
            )
