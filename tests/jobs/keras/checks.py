"""What tests of Keras have in common."""

from __future__ import annotations

from pathlib import Path

from tests.jobs.keras.drill import Outcome, Server

_known: dict[str, Outcome] = {}


def moments(*names: str) -> list[str]:
    return [option for name in names for option in ("--interrupt", name)]


class Case:
    """A script with its arguments, in a folder of its own."""

    def __init__(self, server: Server, folder: Path, script: str, *arguments: str, **environment: str) -> None:
        self.server, self.folder, self.script = server, folder, script
        self.arguments, self.environment = arguments, environment
        folder.mkdir(exist_ok=True)

    def run(self, *more: str, **environment: str) -> Outcome:
        environment = {**self.environment, **environment}
        return self.server.run(self.script, *self.arguments, *more, folder=self.folder, **environment)

    def uninterrupted(self) -> Outcome:
        """The same without holdfast, run once for each kind."""
        key = repr((id(self.server), self.script, self.arguments, sorted(self.environment.items())))
        if key not in _known:
            self.folder.mkdir(exist_ok=True)
            _known[key] = self.run(HOLDFAST_ENABLED="0")
            assert _known[key].code == 0, _known[key].log
        return _known[key]

    def interrupted(self, *attempts: list[str]) -> Outcome:
        """One attempt after the other, each of which is told to stop; then one that goes on to the end."""
        for attempt in attempts:
            outcome = self.run(*attempt)
            assert outcome.code == 143, outcome.log
        return self.run()

    def check(self, *attempts: list[str]) -> Outcome:
        """An interrupted run ends with the same bits as one that was not."""
        last = self.interrupted(*attempts)
        assert last.code == 0, last.log
        assert last.result == self.uninterrupted().result, last.log
        return last
