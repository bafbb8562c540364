"""The demo's task: sort the letters of a short string. A checker knows the answer, so the reward is exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LETTERS = "abcdefgh"
PAD, ASK, END = len(LETTERS), len(LETTERS) + 1, len(LETTERS) + 2
ALPHABET = LETTERS + " >."
VOCABULARY = len(ALPHABET)


@dataclass(frozen=True)
class SortTask:
    """Prompts `  dbca>` of a fixed width, answers `abcd.` of up to `longest + 1` characters."""

    shortest: int = 3
    longest: int = 6

    @property
    def answer_length(self) -> int:
        """The most characters an answer may take, the final point included."""
        return self.longest + 1

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(prompts (count, longest+1), answers (count, longest+1)); answers are padded behind their point."""
        lengths = torch.randint(self.shortest, self.longest + 1, (count, 1), generator=generator)
        letters = torch.randint(0, len(LETTERS), (count, self.longest), generator=generator)
        place = torch.arange(self.longest)
        prompts = torch.where(place >= self.longest - lengths, letters, PAD)
        # PAD sorts behind every letter, so the sorted prompt is the answer followed by padding
        ordered = torch.cat([prompts.sort(1).values, torch.full((count, 1), PAD)], 1)
        answers = ordered.scatter(1, lengths, END)
        return torch.cat([prompts, torch.full((count, 1), ASK)], 1), answers

    @staticmethod
    def mask(answers: Tensor) -> Tensor:
        """True up to and including the first point: what the model wrote by its own choice."""
        ended = (answers == END).int().cumsum(1)
        return (ended - (answers == END).int()) == 0

    def reward(self, completions: Tensor, answers: Tensor) -> Tensor:
        """1 for exactly the right answer, else 0; what follows the point does not count."""
        mask = self.mask(answers)
        return ((completions == answers) | ~mask).all(1).float()


def text(ids: Tensor) -> str:
    """The characters of one row."""
    return "".join(ALPHABET[i] for i in ids.tolist())
