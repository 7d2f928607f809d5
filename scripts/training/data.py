"""Token sequences by number: sample i is the same under every layout.

``mock`` is a synthetic sequence with structure to learn; ``text`` are the bytes of the shipped text.
"""

from __future__ import annotations

from pathlib import Path

import torch

_TEXT = Path(__file__).with_name("text.txt")


class Samples:
    """The training samples of a run."""

    def __init__(self, kind: str, *, vocab_size: int, sequence_length: int, seed: int) -> None:
        """Prepare the source.

        Args:
            kind: ``mock`` or ``text``; bytes are folded into ``vocab_size``.
        """
        self.vocab_size, self.sequence_length, self.seed = vocab_size, sequence_length, seed
        self._bytes: torch.Tensor | None = None
        if kind == "text":
            self._bytes = torch.tensor(list(_TEXT.read_bytes()), dtype=torch.int64) % vocab_size

    def sample(self, index: int) -> torch.Tensor:
        """Return (sequence_length + 1) token numbers."""
        length = self.sequence_length + 1
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        if self._bytes is not None:
            start = int(torch.randint(len(self._bytes), (1,), generator=generator))
            return self._bytes[(start + torch.arange(length)) % len(self._bytes)]
        # Each token follows from the one before by a fixed rule, except for one in eight.
        noise = torch.randint(self.vocab_size, (length,), generator=generator).tolist()
        random = (torch.rand(length, generator=generator) < 0.125).tolist()
        tokens = [noise[0]]
        for step in range(1, length):
            tokens.append(noise[step] if random[step] else (5 * tokens[-1] + 1) % self.vocab_size)
        return torch.tensor(tokens, dtype=torch.int64)

    def batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """Return ``tokens``, ``labels`` and ``position_ids``, (len(indices), sequence_length) each."""
        rows = torch.stack([self.sample(index) for index in indices])
        positions = torch.arange(self.sequence_length).expand(len(indices), -1)
        return {
            "tokens": rows[:, :-1].contiguous(),
            "labels": rows[:, 1:].contiguous(),
            "position_ids": positions.contiguous(),
        }
