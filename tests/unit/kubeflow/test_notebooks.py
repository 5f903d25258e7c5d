"""The notebooks as local processes: a job is submitted, paused in the middle, resumed, and cleared away."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

import nbformat
import psutil
import pytest

from tests.unit.kubeflow import notebooks

pytestmark = pytest.mark.core(0)

NOTEBOOKS = sorted(notebooks.FOLDER.glob("*.ipynb"))


def processes_of(folder: Path) -> list[psutil.Process]:
    """Those that were started for the notebook, or by it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("XDG_STATE_HOME") == notebooks.state_of(folder):
                found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("path", "check", "steps", "nodes"),
    [
        pytest.param(notebooks.QWEN, notebooks.check_qwen, 800, 2, id="qwen"),
        pytest.param(notebooks.GPT2, notebooks.check_gpt2, 2000, 1, id="gpt2"),
    ],
)
def test_a_notebook_trains_here_is_paused_in_the_middle_and_leaves_nothing(path, check, steps, nodes, tmp_path):
    output, jobs = tmp_path / "out", Path(notebooks.state_of(tmp_path), "holdfast", "jobs")

    def before_clean_up() -> None:
        assert len(list(jobs.iterdir())) == 1
        notebooks.check_final(output / "run" / "final")

    done = notebooks.run(path, tmp_path, before_clean_up, OUTPUT_DIR="out", STEPS=steps, NODES=nodes, ROWS=400)
    check(done, steps)
    _, alive = psutil.wait_procs(processes_of(tmp_path), timeout=60)
    assert not alive, [process.cmdline() for process in alive]
    assert not list(jobs.iterdir())
    assert not output.exists()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_what_a_run_leaves_in_it(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert [cell.id for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])] == ["parameters"]
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}, cell.id
        assert not cell.get("outputs"), cell.id
        assert cell.get("execution_count") is None, cell.id
    assert not re.search(r"/(home|root|work|tmp|Users)/", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_steps_of_a_notebook_are_numbered(path):
    notebook = nbformat.read(path, as_version=4)
    titles = re.findall(r"^## (\d+)\. (.+)$", "\n".join(cell.source for cell in notebook.cells), re.MULTILINE)
    assert [int(number) for number, _ in titles] == list(range(1, len(titles) + 1))
    both = ["Install", "Configure", "Stage model and data", "Define the training function", "Submit"]
    own = ["Verify checkpoints"] if path == notebooks.QWEN else ["Watch it", "The same on the command line"]
    assert [title for _, title in titles] == [*both, *own, "Try the model", "Clean up"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_readme_names_the_variables_of_a_notebook(path):
    named = set(re.findall(r"EXAMPLE_\w+", (notebooks.FOLDER / "README.md").read_text(encoding="utf-8")))
    assert set(re.findall(r"EXAMPLE_\w+", path.read_text(encoding="utf-8"))) == named


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tiny_model_trains_for_more_steps_by_default(path, monkeypatch):
    [cell] = [cell for cell in nbformat.read(path, as_version=4).cells if cell.id == "parameters"]
    steps = {}
    for offline in ("0", "1"):
        monkeypatch.setenv("EXAMPLE_OFFLINE", offline)
        monkeypatch.delenv("EXAMPLE_STEPS", raising=False)
        exec(cell.source, found := {})
        steps[offline] = found["STEPS"]
    assert steps == {"0": 300, "1": 1000}


def source_of(path: Path, cell: str) -> str:
    [found] = [one for one in nbformat.read(path, as_version=4).cells if one.id == cell]
    return found.source


def test_the_gpt2_notebook_trains_another_model_too(tmp_path, monkeypatch):
    """Which has other names for its sizes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    monkeypatch.chdir(tmp_path)
    space = {"os": os, "here": str(tmp_path), "OFFLINE": True, "ROWS": 20}
    exec(source_of(notebooks.GPT2, "stage"), space)
    config = Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(space["model_dir"])
    exec(source_of(notebooks.GPT2, "train-function"), space)
    space["train"](space["model_dir"], space["data_file"], steps=1, batch_size=1)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("first", ["model-00001-of-00002.safetensors", "pytorch_model-00001-of-00002.bin"])
def test_a_model_in_several_files_is_fetched_whole(path, first, tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    asked = {}
    rows = datasets.Dataset.from_list([{"ask": "x", "say": "y"}] * 3).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda **given: asked.update(given) or rows)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *given, **more: asked.update(more))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda model: [first, "tokenizer.json"])
    space = {"os": os, "here": str(tmp_path), "OFFLINE": False, "ROWS": 2, "MODEL": "no/folder", "DATASET": "no/file"}
    space |= {"DATASET_CONFIG": "part", "SPLIT": "test", "COLUMNS": ["ask", "say"]}
    exec(source_of(path, "stage"), space)
    assert (asked["path"], asked["name"], asked["split"]) == ("no/file", "part", "test")
    for name in (first, f"{first}.index.json", "tokenizer.json", "merges.txt", "tokenizer.model"):
        assert any(fnmatch(name, pattern) for pattern in asked["allow_patterns"]), name
    with pytest.raises(ValueError, match="COLUMNS: no/file has no column 'text'; it has ask, say"):
        exec(source_of(path, "stage"), {**space, "COLUMNS": ["text"]})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_clean_up_leaves_what_the_notebook_did_not_make(path, tmp_path):
    for name in ("input", "run", "mine"):
        (tmp_path / name).mkdir()
    lines = source_of(path, "clean-up").splitlines()[1:]  # the first deletes the job
    exec("\n".join(lines), {"os": os, "shutil": shutil, "here": str(tmp_path)})
    assert [left.name for left in tmp_path.iterdir()] == ["mine"]


def test_the_qwen_notebook_trains_a_model_that_was_not_made_to_talk(tmp_path, monkeypatch):
    """Whose tokenizer has neither a template for it nor a token to pad with."""
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    space = {"os": os, "here": str(tmp_path), "OFFLINE": True, "ROWS": 20, "DATASET": "none"}
    exec(source_of(notebooks.QWEN, "stage"), {**space, "COLUMNS": ["instruction", "input", "output"]})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "input/model")
    tokenizer.chat_template = tokenizer.pad_token = None
    for left in (tmp_path / "input/model").glob("*.jinja"):
        left.unlink()
    tokenizer.save_pretrained(tmp_path / "input/model")
    exec(source_of(notebooks.QWEN, "train-function"), space)
    space["train"](str(tmp_path / "input/model"), str(tmp_path / "input/data.jsonl"), steps=1, batch_size=2)
