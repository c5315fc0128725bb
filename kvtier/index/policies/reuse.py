"""`reuse`: who promises the fewest hits for the time it would stay leaves first, as this traffic has shown.

What a plain LRU or FIFO cannot know of KV caches is learned as they run. Most chunks are used once. Those
that come again do so after a pause, of a reader or a tool, that depends on the traffic and is longer than a
small cache keeps anybody; and who came twice comes a third time far more often than who came once. So
entries are told apart by how often they were used, once, twice or more, and for each of these classes it is
counted after which pause they come again, also of those that were evicted meanwhile: a key takes 8 bytes to
remember, its chunk megabytes. What an entry is worth then is Gittins' index: the best ratio, over all times
that it could be kept, of the probability that it comes in that time to how long it stays on average. That is
the hit density of Beckmann et al., "LHD", NSDI'18, with the best end in place of the usual one, learned from
the keys that are gone too, and with one list a class in place of samples.

Within a class prefixes are used from tail to head, so that heads outlive tails.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from kvtier.index.policies.base import NONE, MarkedPolicy, Queue
from kvtier.index.policies.ghost import STAMPS, Ghost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy.typing as npt

CLASSES = 3
"""By uses: one, two, more."""
_CLASS, _LISTED = 3, 4
_TICKS = 16
"""Of the clock, in a second."""
_AGES = 24
"""Ages in octaves of a second: the last is 97 days and more."""
_PLACES = 1 << 19
_LEARN_EVERY = 2048
"""Uses between two looks at what was counted."""
_ENOUGH = 1 << 20
"""Uses after which what was counted before weighs half."""
_PRIOR = 2.0
"""Entries that never came again, added to each class, so that a single one that did proves nothing."""
_MOMENTS = 512
"""Moments at most whose counts are kept."""


def age_class(ticks: int) -> int:
    """Number of the octave of an age."""
    return min((ticks // _TICKS + 1).bit_length() - 1, _AGES - 1)


class Reuse(MarkedPolicy[list[Queue]]):
    """A list for each class, in the order of use. The least of the oldest leaves."""

    name = "reuse"

    def __init__(self, pins: array[int], key: Callable[[int], bytes], wall: Callable[[], float]) -> None:
        super().__init__(pins, key, wall)
        self._used = array("I")  # by row: when it was last used
        self._ghost = Ghost(_PLACES)
        self._start = wall()
        self._listed = 0
        self.seen = Seen()

    def group(self) -> list[Queue]:
        """See Policy."""
        return [Queue() for _ in range(CLASSES)]

    def grow(self) -> None:
        """See Policy."""
        super().grow()
        self._used.append(0)

    def enter(self, row: int) -> None:
        """See Policy."""
        now = self._now()
        found = self._ghost.recall(self._key(row))
        self._used[row] = now
        if found is None:
            self._mark[row] = 0
            self.seen.first(now)
        else:
            self._mark[row] = self.seen.again(found[0], (now - found[1]) % STAMPS, now)

    def link(self, group: list[Queue], row: int) -> None:
        """See Policy."""
        mark = self._mark[row]
        if mark & _LISTED:
            self.use(group, (row,))
        else:
            self._mark[row] = mark | _LISTED
            self._push(group[mark], row)
            self._listed += 1

    def use(self, group: list[Queue], rows: Iterable[int]) -> None:
        """See Policy."""
        now, used, marks, again = self._now(), self._used, self._mark, self.seen.again
        for row in rows:
            before = marks[row] & _CLASS
            after = again(before, max(0, now - used[row]), now)
            used[row], marks[row] = now, after | _LISTED
            self._remove(group[before], row)
            self._push(group[after], row)

    def order(self, group: list[Queue], rows: Iterable[int]) -> None:
        """See Policy."""
        for row in rows:
            queue = group[self._mark[row] & _CLASS]
            self._remove(queue, row)
            self._push(queue, row)

    def victim(self, group: list[Queue]) -> int:
        """See Policy."""
        now, worth = self._now(), self.seen.worth
        found, least = NONE, float("inf")
        for number, queue in enumerate(group):
            while (row := queue.oldest) != NONE and self._pins[row]:
                self._remove(queue, row)
                self._listed -= 1
                self._mark[row] = number
            if row != NONE and (value := worth[number][age_class(max(0, now - self._used[row]))]) < least:
                found, least = row, value
        return found

    def evicted(self, row: int) -> None:
        """See Policy."""
        if 4 * self._listed > len(self._ghost):
            self._ghost.grow()
        self._ghost.remember(self._key(row), self._mark[row] & _CLASS, self._used[row])

    def forget(self, group: list[Queue], row: int, pinned: bool) -> None:
        """See Policy."""
        mark = self._mark[row]
        if mark & _LISTED:
            self._remove(group[mark & _CLASS], row)
            self._listed -= 1
        self._mark[row] = 0

    def load(self, group: list[Queue], rows: npt.NDArray[np.int32]) -> None:
        """See Policy. Nothing is known of the entries but their order."""
        self._push_all(group[0], rows)
        np.frombuffer(self._mark, np.uint8)[rows] = _LISTED
        np.frombuffer(self._used, np.uint32)[rows] = self._now()
        self._listed += len(rows)

    def resize(self, rows: int) -> None:
        """See Policy."""
        super().resize(rows)
        self._used = array("I", bytes(4 * rows))

    def _now(self) -> int:
        """Ticks since the start, whichever way the clock steps."""
        return max(0, int((self._wall() - self._start) * _TICKS)) & 0xFFFFFFFF


class Seen:
    """What was seen of a traffic: uses by class, and after which pause the next one came."""

    def __init__(self) -> None:
        self.worth = [[2.0**-age for age in range(_AGES)] for _ in range(CLASSES)]
        """Hits to expect per second, by class and age: before anything is known, the younger the more."""
        self._uses = [0.0] * CLASSES
        self._again = [[0.0] * _AGES for _ in range(CLASSES)]
        self._moments: list[int] = []
        self._uses_then: list[list[float]] = []  # up to each of the moments
        self._left = _LEARN_EVERY

    def first(self, now: int) -> None:
        """Count an entry that is not known. Times in ticks."""
        self._uses[0] += 1
        self._left -= 1
        if self._left == 0:
            self._learn(now)

    def again(self, before: int, pause: int, now: int) -> int:
        """Count a use of an entry that was of the class `before`; returns its class from now on."""
        # As `age_class`, without its call.
        self._again[before][min((pause // _TICKS + 1).bit_length() - 1, _AGES - 1)] += 1
        after = before + 1 if before + 1 < CLASSES else before
        self._uses[after] += 1
        self._left -= 1
        if self._left == 0:
            self._learn(now)
        return after

    def _learn(self, now: int) -> None:
        self._left = _LEARN_EVERY
        if sum(self._uses) > _ENOUGH:
            self._halve()
        if len(self._moments) == _MOMENTS:
            del self._moments[1::2], self._uses_then[1::2]
        self._moments.append(now)
        self._uses_then.append(list(self._uses))
        for number in range(CLASSES):
            self.worth[number] = self._weigh(number, now)

    def _halve(self) -> None:
        for counts in (self._uses, *self._again, *self._uses_then):
            counts[:] = [count / 2 for count in counts]

    def _weigh(self, number: int, now: int) -> list[float]:
        """The worth of a class by age. What came again after a pause was used before it: a share counts
        those alone that could have come by now.
        """
        alive = [1.0]
        for age, again in enumerate(self._again[number]):
            then = now - (3 * 2**age - 2) * _TICKS // 2  # the middle of the octave ago
            place = bisect_left(self._moments, then)
            uses = self._uses_then[place][number] if then > 0 and place < len(self._moments) else 0.0
            share = again / (uses + _PRIOR) if uses else 0.0
            alive.append(max(0.0, alive[-1] - share))
        worth = []
        for age in range(_AGES):
            best = hits = stay = 0.0
            for end in range(age, _AGES - 1):
                hits += alive[end] - alive[end + 1]
                stay += (alive[end] + alive[end + 1]) / 2 * 2**end
                if stay:
                    best = max(best, hits / stay)
            worth.append(best + 1e-12 / 2**age)
        return worth
