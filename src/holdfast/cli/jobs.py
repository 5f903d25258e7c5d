"""``holdfast jobs …``: TrainJobs of a cluster, and jobs of the Kubeflow SDK's local backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.output import Json, emit, guarded, human_bytes, note, show_table
from holdfast.config import parse_duration
from holdfast.errors import ConfigError, HoldfastError, JobNotFoundError

if TYPE_CHECKING:
    from holdfast.kubeflow.jobs import Progress

app = typer.Typer(
    help="Jobs of the Kubeflow SDK: TrainJobs of a cluster, and local ones.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(help="The job's name.")]
On = Annotated[
    str | None,
    typer.Option("--on", help="local or kubernetes.  [default: wherever a job of that name is, local ones first]"),
]
OnAll = Annotated[
    str | None, typer.Option("--on", help="local or kubernetes.  [default: local; with --namespace: kubernetes]")
]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Of the cluster.  [default: the current one]")]


def _jobs(name: str | None, on: str | None, namespace: str | None) -> Any:
    from holdfast.kubeflow import jobs  # the SDK takes a second to import

    if on not in (None, "local", "kubernetes"):
        raise ConfigError(f"--on={on!r} is not accepted; it must be local or kubernetes")
    if on == "local" and namespace is not None:
        raise ConfigError("--namespace means something only for jobs of a cluster")
    return jobs.where(name, on=on, namespace=namespace)


def _all_jobs(on: str | None, namespace: str | None) -> Any:
    return _jobs(None, on or ("local" if namespace is None else "kubernetes"), namespace)


def _as_json(now: Progress) -> dict[str, Any]:
    return {"name": now.name, "state": now.state, "trainingProgress": now.file}


def _tell(now: Progress, as_json: bool) -> None:
    if as_json:
        emit(_as_json(now))
    else:
        typer.echo(str(now))


@app.command("list", help="All jobs, one line each.")
@guarded
def list_jobs(on: OnAll = None, namespace: Namespace = None, as_json: Json = False) -> None:
    found = _all_jobs(on, namespace)
    rows = []
    for name in found.names():
        try:
            rows.append(found.progress(name))
        except JobNotFoundError:
            pass  # deleted just now
        except (HoldfastError, OSError) as error:  # of one job: the others are shown
            note(f"{name}: {error}", error=True)
    if as_json:
        emit({"jobs": [_as_json(row) for row in rows]})
        return
    columns = [("NAME", "l"), ("STATE", "l"), ("STEP", "r"), ("PROGRESS", "r"), ("ETA", "r"), ("LOSS", "r")]
    show_table(
        columns,
        [
            (
                row.name,
                row.state,
                "–" if row.step is None else row.step,
                "–" if row.percent is None else f"{row.percent:.1f} %",
                row.eta or "–",
                row.file.get("loss", "–"),
            )
            for row in rows
        ],
    )


@app.command(help="How far a job is.")
@guarded
def progress(
    name: Name,
    on: On = None,
    namespace: Namespace = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until it ends or is paused.")] = False,
    as_json: Json = False,
) -> None:
    found = _jobs(name, on, namespace)
    if watch:
        from holdfast.kubeflow.view import follow

        last = follow(lambda: found.progress(name), quiet=as_json)
        if as_json:
            _tell(last, as_json)
    else:
        _tell(found.progress(name), as_json)


@app.command(help="A job's checkpoints, newest first.")
@guarded
def checkpoints(name: Name, on: On = None, namespace: Namespace = None, as_json: Json = False) -> None:
    rows = _jobs(name, on, namespace).checkpoints(name)
    if as_json:
        emit({"checkpoints": rows})
        return
    columns = [("CHECKPOINT", "l"), ("STATE", "l"), ("WHY", "l"), ("SIZE", "r"), ("CREATED", "l"), ("WHERE", "l")]
    show_table(
        columns,
        [
            (
                row["name"],
                row.get("state") or "–",
                row.get("reason") or "–",
                human_bytes(row.get("bytes")),
                row.get("created") or "–",
                row["location"],
            )
            for row in rows
        ],
    )


@app.command(help="Save, and stop a job until `holdfast jobs resume`.")
@guarded
def pause(
    name: Name,
    on: On = None,
    namespace: Namespace = None,
    timeout: Annotated[
        str | None, typer.Option(help="Seconds to wait for it.  [default: its grace period and two minutes]")
    ] = None,
    as_json: Json = False,
) -> None:
    from holdfast.kubeflow import jobs

    try:
        limit_s = None if timeout is None else parse_duration(timeout)
    except ValueError as error:
        raise ConfigError(f"--timeout={timeout!r} is not accepted; it must be {error}") from None
    _tell(jobs.paused(_jobs(name, on, namespace), name, limit_s), as_json)


@app.command(help="Go on with a job from its newest checkpoint.")
@guarded
def resume(name: Name, on: On = None, namespace: Namespace = None, as_json: Json = False) -> None:
    found = _jobs(name, on, namespace)
    found.resume(name)
    _tell(found.progress(name), as_json)


@app.command(help="What a job has printed.")
@guarded
def logs(
    name: Name,
    on: On = None,
    namespace: Namespace = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it ends.")] = False,
) -> None:
    for line in _jobs(name, on, namespace).logs(name, follow):
        typer.echo(line)


@app.command(help="End a job, with a save, and forget it. Its checkpoints stay.")
@guarded
def delete(name: Name, on: On = None, namespace: Namespace = None) -> None:
    _jobs(name, on, namespace).delete(name)
    typer.echo(f"{name} is deleted")


@app.command(help="The jobs on a web page of this machine, with buttons to pause and resume, until Ctrl-C.")
@guarded
def page(
    on: OnAll = None,
    namespace: Namespace = None,
    port: Annotated[int, typer.Option(help="0: one that is free.", min=0, max=65535)] = 8642,
) -> None:
    from holdfast.kubeflow.page import Page

    found = _all_jobs(on, namespace)
    try:
        served = Page(found, port=port)
    except OSError as error:
        raise ConfigError(f"--port={port} is not accepted: {error.strerror}; --port=0 takes one that is free") from None
    typer.echo(f"{served.url} shows the jobs to whoever has this address, on this machine; Ctrl-C ends it")
    with served:
        served.serve_forever()
