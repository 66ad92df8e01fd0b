"""`python -m exactmoe.proof.known_answers [--device cuda] [--write [--new-contract]]`.

Compares, or writes answers. --write adds the answers of new cases: on the CPU computed by the
reference; on a GPU by the paths that it has, which must agree (`verify` bounds their dots against
float64). An answer that is already stored changes only with --new-contract: that is a new version
of the bit contract (CONTRACT_VERSION in config.py, docs/numerics.md, CHANGELOG.md).
"""

import argparse
import sys

import torch

from exactmoe.errors import BitMismatch, Unsupported
from exactmoe.plan import architecture_name
from exactmoe.proof.compare import same_bytes
from exactmoe.proof.known_answers.cases import CASES, Case
from exactmoe.proof.known_answers.check import CPU, known_answers
from exactmoe.proof.known_answers.file import (
    FILE,
    Answer,
    answer_of,
    answers_on,
    file_of,
    read_file,
    write_file,
)


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 when a result differs from its stored answer."""
    parser = argparse.ArgumentParser(
        prog="python -m exactmoe.proof.known_answers", description=__doc__
    )
    parser.add_argument("--write", action="store_true", help="add the answers of new cases")
    parser.add_argument(
        "--new-contract", action="store_true", help="with --write: replace answers that differ"
    )
    parser.add_argument(
        "--device", type=torch.device, default=CPU, help="where the cases run (default: cpu)"
    )
    options = parser.parse_args(arguments)
    if options.write:
        return _write(options.device, options.new_contract)
    report = known_answers("auto", device=options.device)
    print(report)
    return 1 if report.failed else 0


def _write(device: torch.device, new_contract: bool) -> int:
    name = architecture_name(device)
    path = FILE if device == CPU else file_of(name)
    before = read_file(path).get(name, {}) if path.is_file() and not new_contract else {}
    made = {case.name: answer for case in CASES if (answer := _answer(case, device)) is not None}
    changed = [
        name
        for name, answer in before.items()
        if name not in made
        or made[name].inputs != answer.inputs
        or not same_bytes(made[name].y, answer.y)
    ]
    if changed:
        print(
            f"{changed} would change. A change of bits is a new contract version: raise "
            "CONTRACT_VERSION, write it in CHANGELOG.md, and add --new-contract.",
            file=sys.stderr,
        )
        return 1
    write_file({name: made}, path)
    print(f"{path}: {len(made)} answers, {len(made) - len(before)} of them new")
    return 0


def _answer(case: Case, device: torch.device) -> Answer | None:
    """None where the device has no path for the case: that is printed."""
    if device == CPU:
        return answer_of(case, "reference")
    try:
        found = answers_on(case, "auto", device)
    except Unsupported as error:
        print(f"{case.name}: no path: {error}", file=sys.stderr)
        return None
    first, *others = found.values()
    if any(not same_bytes(first.y, other.y) for other in others):
        raise BitMismatch(f"{case.name}: {', '.join(found)} give different bits on {device}")
    return first


if __name__ == "__main__":
    sys.exit(main())
