"""Known answers: stored results of fixed small cases, for each architecture (docs/numerics.md).

They find what no comparison of two runs on one machine can: a compiler, library or kernel that
changes a bit everywhere at once. The CPU's are in proof/known_answers.json, those of sm_90 in
proof/known_answers_sm_90.json, and so on. To rewrite an answer is a change of bits: a new contract
version, and a line in the changelog (`python -m exactmoe.proof.known_answers --write` refuses
without `--new-contract`).
"""

from exactmoe.proof.known_answers.cases import CASES, Case
from exactmoe.proof.known_answers.check import known_answers
from exactmoe.proof.known_answers.file import (
    Answer,
    answer_of,
    file_of,
    read_file,
    read_files,
    write_file,
)

__all__ = [
    "CASES",
    "Answer",
    "Case",
    "answer_of",
    "file_of",
    "known_answers",
    "read_file",
    "read_files",
    "write_file",
]
