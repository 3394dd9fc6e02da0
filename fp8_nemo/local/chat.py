"""Turn text into tokens and back: a checkpoint's tokenizer with its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer


class Chat:
    """Use a tokenizer as GRPO does: one user's turn in, one assistant's turn out.

    Args:
        tokenizer: of transformers, with a chat template, a padding and an end token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.pad: int = tokenizer.pad_token_id
        self.end: int = tokenizer.eos_token_id

    @classmethod
    def load(cls, path: Path) -> Chat:
        """Load the tokenizer of a checkpoint on this machine."""
        return cls(AutoTokenizer.from_pretrained(path, local_files_only=True))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text as it stands."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, problem: str) -> list[int]:
        """Return the tokens of a chat in which the user has asked and an answer is due."""
        turn = {"role": "user", "content": problem}
        return self.encode(
            self.tokenizer.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
        )

    def answer(self, text: str) -> list[int]:
        """Return the tokens of an answer and its end."""
        return [*self.encode(text), self.end]

    def texts(self, tokens_BR: Tensor, mask_BR: Tensor) -> list[str]:
        """Return each response as text, without its end; other special tokens stay visible."""
        rows = [row[mask].tolist() for row, mask in zip(tokens_BR, mask_BR, strict=True)]
        return [self.tokenizer.decode(row[:-1] if row[-1] == self.end else row) for row in rows]
