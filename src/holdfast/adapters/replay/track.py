"""``holdfast.track``: what a replayed loop cannot know by itself.

A replay knows what a script reads out of tensors. It does not know values that come from elsewhere and follow from
what was not computed: a score that another library calculates from predictions in one go, an object that gathers
them. One line makes such a value known::

    score = holdfast.track(f1_score(truth, guesses))          # the replay gets the value of the first time
    state = holdfast.track({"best": 0.0, "patience": 3})      # saved with the run, and restored in place
    meter = holdfast.track(Meter())                           # anything with state_dict() and load_state_dict()

Where no loop is followed it returns what it is given, and does nothing.
"""

from __future__ import annotations

import sys
from typing import TypeVar

T = TypeVar("T")


def track(value: T) -> T:
    """Make ``value`` known to a replay of this loop; returns it, or in a replay what it was.

    A dict, a ``torch.Generator``, or an object with ``state_dict()`` and ``load_state_dict()`` is saved with the run
    and restored in place; to be called once for each. Any other value (numbers, text, arrays, tensors, and lists of
    them) is kept each time this line runs, and a replay returns the one of that time.
    """
    replay = sys.modules.get("holdfast.adapters.replay.follower")
    follower = replay.current() if replay is not None else None
    if follower is None:
        return value
    tracked: T = follower.track(value, sys._getframe(1))
    return tracked
