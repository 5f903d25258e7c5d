"""The documents of examples/parallel-training: no command in them is out of date.

Scripts of deploy/minikube are run, with the tools that they call replaced by stand-ins; so are kubectl and minikube,
and kubectl once more in the test of the whole benchmark, against a real cluster. A make command is only looked at by
make itself, which must hear each of its variables, and a training's only for options that its source does not have.
What is really trained is in tests/jobs/parallel: the commands of the README for each part, and one ``make benchmark``,
both in small.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.minikube.documents import DOCUMENTS, EXAMPLE, Command, commands
from tests.unit.minikube.stage import ROOT, SCRIPTS, Stage

COMMANDS = commands()
NAMES = ("README.md", "GETTING_STARTED.md", "EXERCISE.md", "QUICK_REFERENCE.md", "TROUBLESHOOTING.md")


def of(*programs: str) -> list:
    """As parameters, each once."""
    found = {}
    for command in COMMANDS:
        if command.program in programs or (not programs and command.program.endswith(".sh")):
            found.setdefault((command.words, *command.variables.items()), command)
    return [pytest.param(command, id=f"{command.place} {command.text}"[:100]) for command in found.values()]


def test_there_is_something_to_test() -> None:
    assert set(NAMES) - {"README.md"} <= {document.name for document in DOCUMENTS}
    assert len(COMMANDS) > 50
    known = {"make", "python", "kubectl", "minikube", "holdfast", ".", "cd"}
    for command in COMMANDS:
        assert command.program in known or (ROOT / command.program).parent == SCRIPTS, (
            f"{command.place}: {command.text}"
        )


def test_every_script_is_in_a_document() -> None:
    used = {Path(command.program).name for command in COMMANDS}
    assert {path.name for path in SCRIPTS.glob("*.sh")} - {"lib.sh"} <= used


@pytest.mark.parametrize("command", of())
def test_a_script_takes_the_variables_and_arguments_of_the_document(stage: Stage, command: Command) -> None:
    text = (ROOT / command.program).read_text()
    for name in command.variables:
        assert re.search(rf"^# .*\b{name}=", text, re.MULTILINE), f"{command.place}: {command.program} has no {name}"
    if "PREEMPT_AT" in command.variables:
        stage.tell("step", int(command.variables["PREEMPT_AT"]))
        stage.tell("trains_until_deleted", True)
    done = stage.run(Path(command.program).name, *command.words[1:], **command.variables)
    assert done.code == 0, f"{command.place}: {command.text}\n{done.output}{done.errors}"


def made(*words: str) -> str:
    """What make would do."""
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_clean_keeps_the_folder_that_minikube_has_mounted(tmp_path: Path) -> None:
    for folder in ("src", "tests", "examples", "benchmarks", "docs", "results/logs", "results/shared/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "results/comparison.json").write_text("{}")
    direct = tmp_path / "examples/parallel-training/results"  # where the README's own commands write
    direct.mkdir(parents=True)
    (direct / "comparison.json").write_text("{}")
    words = ["make", "-f", str(ROOT / "Makefile"), "clean"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    assert not direct.exists()
    assert {str(path.relative_to(tmp_path)) for path in (tmp_path / "results").rglob("*")} == {
        "results/shared",
        "results/shared/checkpoints",
    }
    (tmp_path / "results/shared/checkpoints").rmdir()
    (tmp_path / "results/shared").rmdir()
    for _ in range(2):
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
        assert not (tmp_path / "results").exists()


def test_what_the_commands_write_is_not_seen_by_git() -> None:
    folders = ["results"]  # of make, and of all commands from the root
    for document in DOCUMENTS:
        text = document.read_text()
        folders += [f"{folder}/results" for folder in re.findall(r"^cd (\S+)$", text, re.MULTILINE)]
    assert len(folders) > 1
    assert {f"/{folder}/" for folder in folders} <= {*(ROOT / ".gitignore").read_text().splitlines()}


@pytest.mark.parametrize("command", of("make"))
def test_make_knows_the_target_and_hears_every_variable(command: Command) -> None:
    whole = made(*command.words[1:])
    for word in command.words[1:]:
        if "=" in word:
            assert made(*(other for other in command.words[1:] if other != word)) != whole, f"{command.place}: {word}"


def options_of(script: Path) -> set[str]:
    """All that begin with two dashes in its source, and in that of the options that the trainings share."""
    found = set()
    for path in (script, EXAMPLE / "options.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant) and str(first.value).startswith("--"):
                    found.add(first.value)
        if "add_options" not in path.read_text():
            break
    return found


@pytest.mark.parametrize("command", of("python"))
def test_a_training_has_the_options_of_the_document(command: Command) -> None:
    script = ROOT / command.words[1]
    assert script.parent == EXAMPLE, command.place
    assert script.exists(), command.place
    known = options_of(script)
    for word in command.words[2:]:
        if word.startswith("--"):
            assert word in known, f"{command.place}: {script.name} has no {word}"


def value_of(command: Command, option: str) -> str | None:
    return command.words[command.words.index(option) + 1] if option in command.words else None


def test_what_the_exercise_trains_is_apart_from_what_make_benchmark_wrote() -> None:
    """That was with another batch, and would not be compared with it."""
    ours = [command for command in COMMANDS if command.place.startswith("EXERCISE.md:") and command.program == "python"]
    folders = {value_of(command, "--save-path") for command in ours if "benchmark.py" not in command.text}
    assert len(folders) == 1
    assert not folders & {None, "results"}


def test_who_wants_all_of_cifar10_gets_it() -> None:
    """Nothing in a fresh cluster has it: by itself it would be replaced by the stand-in."""
    whole = [command for command in COMMANDS if command.variables.get("IMAGES") == "50000"]
    assert whole
    for command in whole:
        options = command.variables["TRAINING_ARGS"].split()
        assert options[options.index("--data") + 1] == "cifar10"
        assert f'CIFAR10_URL = "{options[options.index("--data-url") + 1]}"' in (EXAMPLE / "sources.py").read_text()


def test_the_cluster_of_the_exercise_is_removed_after_all_that_needs_it() -> None:
    of_cluster = [
        one for one in COMMANDS if one.place.startswith("EXERCISE.md:") and one.program not in ("make", "python")
    ]
    ordered = sorted(of_cluster, key=lambda command: int(command.place.partition(":")[2]))
    names = [Path(command.program).name for command in ordered]
    assert names.index("cleanup.sh") == len(names) - 1
    assert names.count("run-benchmark.sh") > 1


def test_the_parts_of_the_benchmark_are_as_large_as_the_whole() -> None:
    """Without a number of images, each would take all of CIFAR-10."""
    text = (EXAMPLE / "benchmark.py").read_text()
    (sizes,) = re.findall(r"^ORDINARY = (\{.+\})$", text, re.MULTILINE)
    ordinary = ast.literal_eval(sizes)
    ours = [command for command in COMMANDS if command.place.startswith("QUICK_REFERENCE.md:")]
    trainings = [command for command in ours if "_training.py" in command.text]
    assert len(trainings) == 2
    for command in trainings:
        for option in ("epochs", "images", "test_images"):
            assert value_of(command, f"--{option.replace('_', '-')}") == str(ordinary[option]), command.place
        assert value_of(command, "--batch-size") is None
    assert f'"--batch-size", type=whole(1), default={ordinary["batch_size"]},' in (EXAMPLE / "options.py").read_text()


def test_an_image_in_a_registry_is_installed_from_there(stage: Stage) -> None:
    (build,) = (command for command in COMMANDS if "REGISTRY" in command.variables)
    (install,) = (command for command in COMMANDS if "IMAGE" in command.variables)
    done = stage.run(Path(build.program).name, **build.variables)
    assert f"IMAGE={install.variables['IMAGE']} install-ray.sh" in done.output


def test_twice_the_batch_is_twice_that_of_the_parts_before() -> None:
    text = (EXAMPLE / "EXERCISE.md").read_text()
    (usual,) = re.findall(r"`--batch-size` is (\d+) in both", text)
    assert f'"--batch-size", type=whole(1), default={usual},' in (EXAMPLE / "options.py").read_text()
    question = text.partition("**Question 7.**")[2].partition("**Question 8.**")[0]
    assert f"BATCH_SIZE={2 * int(usual)}\n" in question


def test_who_calls_python_is_told_of_the_environment_first() -> None:
    for document in DOCUMENTS:
        ours = [command for command in COMMANDS if command.place.startswith(f"{document.name}:")]
        programs = [command.program for command in ours]
        if "python" in programs:
            assert ours[programs.index(".")].words == (".", ".venv/bin/activate"), document.name
            assert programs.index(".") < programs.index("python"), document.name
    assert "VENV := .venv\n" in (ROOT / "Makefile").read_text()


def test_the_size_that_the_documents_say_is_that_of_the_script() -> None:
    script = (SCRIPTS / "run-benchmark.sh").read_text()
    epochs, images = (re.search(rf"{name}=\$\{{{name}:-(\d+)\}}", script)[1] for name in ("EPOCHS", "IMAGES"))
    said = (EXAMPLE / "GETTING_STARTED.md").read_text()
    assert f"{epochs} epochs of {int(images):,} images" in said
    assert f"EPOCHS={epochs} " in script
    assert f"#   IMAGES={images} " in script


def test_the_storage_of_minikube_is_not_said_to_be_shared() -> None:
    for command in COMMANDS:
        assert "claim" not in command.variables.get("WITH", "") or "KUBE_CONTEXT" in command.variables, command.place


@pytest.mark.parametrize("command", of("holdfast"))
def test_the_command_line_has_the_options_of_the_document(command: Command) -> None:
    words = [sys.executable, "-m", "holdfast.cli", command.words[1], "--help"]
    environ = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command.place}: {done.stderr}"
    for word in command.words[2:]:
        assert not word.startswith("--") or word in done.stdout, f"{command.place}: {word}"


@pytest.mark.parametrize("command", of("kubectl", "minikube"))
def test_the_tools_are_called_for_the_cluster_of_the_scripts(stage: Stage, command: Command) -> None:
    assert " holdfast" in command.text, f"{command.place}: {command.text}"
    environ = {"PATH": str(stage.bin), "STAND_INS": str(stage.state)}
    done = subprocess.run(["sh", "-c", shlex.join(command.words)], env=environ, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_variables_of_the_documents_are_those_of_the_scripts() -> None:
    """In the table of what the scripts can be told."""
    text = (EXAMPLE / "QUICK_REFERENCE.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    helps = "".join(path.read_text() for path in SCRIPTS.glob("*.sh"))
    for name in re.findall(r"`([A-Z][A-Z_]{3,})(?:=[^`]*)?`", text):
        assert re.search(rf"\b{name}=", helps) or re.search(rf"[,(]{name}[,)]", makefile), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" not in target:
            assert (document.parent / path).exists(), target
            headings = {title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
            assert not anchor or anchor in headings, target


def test_every_question_of_the_exercise_has_an_answer() -> None:
    text = (EXAMPLE / "EXERCISE.md").read_text()
    questions, _, answers = text.partition("## Answers")
    asked = [int(number) for number in re.findall(r"\*\*Question (\d+)\.\*\*", questions)]
    assert asked == list(range(1, len(asked) + 1))
    assert [int(number) for number in re.findall(r"^(\d+)\. ", answers, re.MULTILINE)] == asked


def test_the_troubles_that_people_have_are_there() -> None:
    headings = re.findall(r"^## (.+)$", (EXAMPLE / "TROUBLESHOOTING.md").read_text(), re.MULTILINE)
    wanted = {
        "Pods stay Pending",
        "Workers do not connect",
        "Out of memory",
        "Training is slow",
        "The accuracies differ",
    }
    assert wanted <= set(headings)


def test_the_messages_that_are_explained_are_those_of_the_scripts() -> None:
    text = (EXAMPLE / "TROUBLESHOOTING.md").read_text()
    said = "".join(path.read_text() for path in (*SCRIPTS.glob("*.sh"), *EXAMPLE.glob("*.py")))
    for message in ("they did not do the same work", "OTHER WEIGHTS", "cannot be reached", "does not answer"):
        assert message in text
        assert message in said
    for pattern in (
        r"docker has \S+ GB of memory, and \S+ nodes want \S+ GB each",
        r"the cluster has \S+ nodes instead of \S+",
        r"the cluster '\S+' does not answer",
        r"docker does not answer",
    ):
        assert len(re.findall(pattern, text)) == len(re.findall(pattern, said)) == 1, pattern
