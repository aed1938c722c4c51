"""What proposes tokens that the model then verifies, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LONGEST, SHORTEST = 4, 2  # words of the text that must have come before


@dataclass(slots=True)
class NgramIndex:
    """Where the last few tokens of a text came before, and so what may follow. Grows with the text; each token costs
    the same."""

    text: list[int] = field(default_factory=list)
    _after: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, tokens: Sequence[int]) -> None:
        """The text goes on with these."""
        for token in tokens:
            for n in range(SHORTEST, min(LONGEST, len(self.text)) + 1):
                self._after[tuple(self.text[-n:])] = len(self.text)
            self.text.append(token)

    def proposed(self, most: int) -> list[int]:
        """What followed the last time that the text's last tokens came, the longest match first; empty where they never
        did.

        Examples
        --------
        >>> index = NgramIndex()
        >>> index.add([7, 8, 9, 5, 7, 8])
        >>> index.proposed(2)
        [9, 5]
        """
        for n in range(min(LONGEST, len(self.text)), SHORTEST - 1, -1):
            at = self._after.get(tuple(self.text[-n:]))
            if at is not None:
                return self.text[at : at + most]
        return []
