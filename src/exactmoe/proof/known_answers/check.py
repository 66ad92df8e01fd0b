"""known_answers: this machine's results of the stored cases against the stored ones."""

import time
from collections.abc import Callable

import torch

from exactmoe.config import CONTRACT_VERSION
from exactmoe.errors import BitMismatch, Unsupported
from exactmoe.plan import architecture_name
from exactmoe.proof.known_answers.cases import CASES, Case
from exactmoe.proof.known_answers.file import Answer, answers_on, read_files
from exactmoe.proof.machine import fingerprint
from exactmoe.proof.report import Report

CPU = torch.device("cpu")


def known_answers(
    backend: str = "auto",
    stored: dict[str, dict[str, Answer]] | None = None,
    progress: Callable[[str], None] | None = None,
    device: torch.device = CPU,
) -> Report:
    """Run every case on a device and compare its bytes with the answer of its architecture.

    On a GPU each case runs on every path that it has there. Where nothing is stored for an
    architecture, and for a case that has no path there, the report says so (`not_run`).

    Args:
        backend: of the layers.
        stored: architecture -> case -> answer; None: the files of this package.
        progress: called with the name of each case before it runs.
        device: where the cases run.

    Raises:
        CheckpointError: a file cannot be read, or is of another contract version.
        BitMismatch: a case that runs has no answer, or its inputs came out otherwise.
    """
    start, name = time.perf_counter(), architecture_name(device)
    answers = (read_files() if stored is None else stored).get(name, {})
    report = Report(
        f"known answers: {name}, contract {CONTRACT_VERSION}", machine=fingerprint(device)
    )
    if not answers and device != CPU:
        report.not_run["known answers"] = f"none are stored for {name}"
        return report
    for case in CASES:
        if progress is not None:
            progress(f"{report.subject}: {case.name}")
        _check(report, case, answers, backend, device)
    report.seconds = time.perf_counter() - start
    return report


def _check(
    report: Report, case: Case, answers: dict[str, Answer], backend: str, device: torch.device
) -> None:
    expected = answers.get(case.name)
    try:
        found = answers_on(case, backend, device)
    except Unsupported as error:
        if expected is not None or device == CPU:
            raise
        report.not_run[case.name] = str(error)
        return
    if expected is None:
        raise BitMismatch(
            f"known answers of {architecture_name(device)} have no case {case.name!r}"
        )
    for used, answer in found.items():
        if answer.inputs != expected.inputs:
            raise BitMismatch(
                f"inputs of {case.name!r} have SHA-256 {answer.inputs}; stored: {expected.inputs}: "
                "the numbers differ before any layer ran"
            )
        name = case.name if len(found) == 1 else f"{case.name}, {used}"
        report.compare("known answers", name, expected.y, answer.y)
