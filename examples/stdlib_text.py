"""Real text that is always there: the source files of the Python standard library, as bytes.

No download, no licence question, and about twelve megabytes that a language model can learn something from. The files
depend on the Python version, so losses compare between runs of one interpreter, not between machines.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

VOCABULARY = 256
DOCUMENT_START = 0
"""The byte that stands before each document. Python source holds no zero byte, so it is free for this."""

HELD_OUT_EVERY = 20
"""One file in so many is kept for evaluation."""

# Test suites are left out because not every distribution ships them, packages because they are not the library.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Batch(NamedTuple):
    """Windows of a corpus: `tokens` and `segment_ids`, both int32 [rows, length].

    `segment_ids` numbers the document that a token belongs to, from 1, and differs between neighbouring documents. It
    is what `jax_qla.chunk_gated_delta_rule` takes to keep packed documents apart.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray


@dataclass(frozen=True)
class Corpus:
    """Documents laid end to end: `text` uint8 [bytes]; `offsets` int64 [documents], where each one starts."""

    text: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, documents: list[bytes]) -> Corpus:
        marked = [bytes([DOCUMENT_START]) + document for document in documents]
        lengths = np.array([len(document) for document in marked], np.int64)
        return cls(np.frombuffer(b"".join(marked), np.uint8), np.cumsum(lengths) - lengths)

    def windows(self, starts: np.ndarray, length: int) -> Batch:
        """The `length` bytes from each of `starts` (int [rows])."""
        positions = starts[:, None] + np.arange(length)
        segment_ids = np.searchsorted(self.offsets, positions, side="right")
        return Batch(self.text[positions].astype(np.int32), segment_ids.astype(np.int32))

    def random_windows(self, rows: int, length: int, *, seed: int, step: int) -> Batch:
        """The training batch of one step.

        A function of (seed, step) and nothing else: a run that resumes sees exactly the batches it would have seen.
        """
        generator = np.random.default_rng((seed, step))
        return self.windows(generator.integers(0, len(self.text) - length, size=rows), length)

    def even_windows(self, rows: int, length: int) -> Batch:
        """`rows` windows spread evenly over the corpus, the same ones at every call."""
        return self.windows(np.linspace(0, len(self.text) - length, rows).astype(np.int64), length)

    def unigram_entropy(self) -> float:
        """Entropy of the byte frequencies in nats: the loss of the best model that ignores all context."""
        frequency = np.bincount(self.text, minlength=VOCABULARY) / len(self.text)
        frequency = frequency[frequency > 0]
        return float(-np.sum(frequency * np.log(frequency)))


def load() -> tuple[Corpus, Corpus]:
    """The standard library of the running interpreter as (training corpus, held-out corpus)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    files = sorted(path.as_posix() for path in relative if not _LEFT_OUT & set(path.parts))
    documents = [(root / file).read_bytes() for file in files]
    held_out = documents[::HELD_OUT_EVERY]
    training = [document for index, document in enumerate(documents) if index % HELD_OUT_EVERY]
    return Corpus.of(training), Corpus.of(held_out)
