"""The start of an attempt: what it costs the board that all ranks meet on."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

from holdfast.agree import LocalBoard
from holdfast.config import Settings
from holdfast.runtime.session import Place, Session, open_session


class Counting(LocalBoard):
    """A board that counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        self.asked["wait"] += 1
        return super().wait(key, timeout_s)

    def entries(self, key: str) -> list[bytes]:
        self.asked["entries"] += 1
        return super().entries(key)


def test_each_rank_waits_as_often_however_many_there_are(tmp_path: Path) -> None:
    waits = {}
    for world in (2, 60):
        board = Counting()
        settings = Settings.load({}, dir=str(tmp_path / f"of-{world}"))
        sessions: dict[int, Session] = {}

        def start(rank: int, world: int = world, board: Counting = board, settings: Settings = settings) -> None:
            sessions[rank] = open_session(settings, Place(rank, world, board))  # noqa: B023

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(sessions) == list(range(world))
        assert all(sorted(session.peers) == list(range(world)) for session in sessions.values())
        assert board.asked["entries"] == 1
        waits[world] = board.asked["wait"] / world
        for backend in sessions[0].backends:
            backend.close()
    assert waits[60] <= 2
    assert waits[60] <= waits[2] + 1
