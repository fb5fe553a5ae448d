"""Actions by name or number: which of a library's numbered actions a text means."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

Illegal = Literal["lose", "first"]
"""What an action that is unreadable or not legal does: end the episode at a penalty, or stand for the
first legal action (the one of the smallest number)."""

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MAX_TEXT = 20_000
_MAX_SHOWN = 100


class Choices:
    """Numbered actions, `first`, `first + 1`, ..., with or without names.

    A text means the first integer or name that occurs in it as a word of its own, whatever its
    letters' case; if there is `<answer>...</answer>`, in the last of those alone. An integer that is
    no action's number means none.

    Args:
        count: how many actions there are.
        names: of all, in the order of their numbers; or of some, by number: then only these can be
            meant, and by name alone.
        first: the smallest number.
    """

    def __init__(self, count: int, names: Sequence[str] | Mapping[int, str] = (), first: int = 0) -> None:
        if names and isinstance(names, Sequence) and len(names) != count:
            raise ValueError(f"actions: {len(names)} names are not accepted; accepted: {count}")
        self._first, self._count = first, count
        self._some = isinstance(names, Mapping)
        self._names = dict(names) if isinstance(names, Mapping) else dict(enumerate(names, first))
        self._numbers = {name.casefold(): number for number, name in self._names.items()}
        if len(self._numbers) != len(self._names) or "" in self._numbers:
            raise ValueError(f"actions: {list(names)!r:.200} is not accepted; accepted: different names")
        # the longest first, as one name may begin with another
        known = "".join(rf"{re.escape(name)}|" for name in sorted(self._numbers, key=len, reverse=True))
        self._words = re.compile(rf"(?<![^\W_])(?:{known}-?[0-9]+)(?![^\W_])")

    def read(self, text: str) -> int | None:
        """The number of the action that a text means; None: of none."""
        tagged = _TAG.findall(text[:_MAX_TEXT])
        found = self._words.search((tagged[-1] if tagged else text[:_MAX_TEXT]).casefold())
        if found is None:
            return None
        word = found.group()
        if word in self._numbers:
            return self._numbers[word]
        if self._some or len(word) > 12:
            return None
        return int(word) if self._first <= int(word) < self._first + self._count else None

    def name(self, number: int) -> str:
        """How an action is shown."""
        return self._names.get(number, str(number))

    def listed(self, numbers: Collection[int] | None = None) -> str:
        """All actions, or some of them, for the agent to read."""
        if numbers is None:
            if not self._names:
                return f"{self._first} to {self._first + self._count - 1}"
            numbers = self._names
        shown = [self.name(number) for number in sorted(numbers)[:_MAX_SHOWN]]
        return " ".join(shown) + (" ..." if len(numbers) > _MAX_SHOWN else "")
