"""On which step all ranks save."""

from holdfast.agree.board import Board, BoardLostError, BoardSilentError, DirectoryBoard, LocalBoard
from holdfast.agree.bounded import BoundedBoard
from holdfast.agree.protocol import Agreement, Call, Decision

__all__ = [
    "Agreement",
    "Board",
    "BoardLostError",
    "BoardSilentError",
    "BoundedBoard",
    "Call",
    "Decision",
    "DirectoryBoard",
    "LocalBoard",
]
