"""Jobs on a real Slurm of two nodes."""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.slurm import Slurm, cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RANK = """
import json, os, sys
names = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURMD_NODENAME")
with open(f"{sys.argv[1]}/rank-{os.environ['SLURM_PROCID']}.json", "w") as file:
    json.dump({name: os.environ[name] for name in names}, file)
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    # Not below pytest's own folder: munge's socket wants a short path.
    with tempfile.TemporaryDirectory(prefix="s-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        with cluster(Path(folder, "slurm")) as made:
            yield made


def test_a_batch_job_runs_a_python_rank_on_each_node(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    script = tmp_path / "job.sh"
    script.write_text(
        textwrap.dedent(
            f"""\
            #!/bin/sh
            #SBATCH --nodes=2 --ntasks-per-node=1 --output={tmp_path}/log
            srun {sys.executable} {tmp_path}/rank.py {tmp_path}
            """
        )
    )
    job = slurm.submit(script)
    assert slurm.until_ended(job) == "COMPLETED", (tmp_path / "log").read_text()
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [rank["SLURMD_NODENAME"] for rank in ranks] == ["n1", "n2"]
    assert {(rank["SLURM_JOB_ID"], rank["SLURM_NTASKS"]) for rank in ranks} == {(job, "2")}
