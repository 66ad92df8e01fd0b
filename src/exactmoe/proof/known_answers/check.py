"""known_answers: this machine's results of the stored cases against the stored ones."""

import time
from collections.abc import Callable

from exactmoe.errors import BitMismatch
from exactmoe.proof.known_answers.cases import CASES
from exactmoe.proof.known_answers.file import Answer, answer_of, read_file
from exactmoe.proof.machine import CONTRACT_VERSION
from exactmoe.proof.report import Report

ARCHITECTURE = "cpu"


def known_answers(
    backend: str = "auto",
    stored: dict[str, dict[str, Answer]] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run every case on the CPU and compare its bytes with the stored answer.

    Args:
        backend: of the layers.
        stored: architecture -> case -> answer; None: the file of this package.
        progress: called with the name of each case before it runs.

    Raises:
        CheckpointError: the file cannot be read, or is of another contract version.
        BitMismatch: a case has no answer, or its inputs came out otherwise.
    """
    start = time.perf_counter()
    answers = (read_file() if stored is None else stored).get(ARCHITECTURE, {})
    report = Report(f"known answers: {ARCHITECTURE}, contract {CONTRACT_VERSION}")
    for case in CASES:
        if progress is not None:
            progress(f"{report.subject}: {case.name}")
        if case.name not in answers:
            raise BitMismatch(f"known answers of {ARCHITECTURE} have no case {case.name!r}")
        expected, found = answers[case.name], answer_of(case, backend)
        if found.inputs != expected.inputs:
            raise BitMismatch(
                f"inputs of {case.name!r} have SHA-256 {found.inputs}; stored: {expected.inputs}: "
                "the numbers differ before any layer ran"
            )
        report.compare("known answers", case.name, expected.y, found.y)
    report.seconds = time.perf_counter() - start
    return report
