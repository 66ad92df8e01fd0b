"""`python -m exactmoe.proof.known_answers [--write [--new-contract]]`: compare or write answers.

--write adds the answers of new cases, computed by the reference. An answer that is already stored
changes only with --new-contract: that is a new version of the bit contract (CONTRACT_VERSION in
proof/machine.py, docs/numerics.md, a line in CHANGELOG.md).
"""

import argparse
import sys

from exactmoe.proof.compare import same_bytes
from exactmoe.proof.known_answers.cases import CASES
from exactmoe.proof.known_answers.check import ARCHITECTURE, known_answers
from exactmoe.proof.known_answers.file import FILE, answer_of, read_file, write_file


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 when a result differs from its stored answer."""
    parser = argparse.ArgumentParser(
        prog="python -m exactmoe.proof.known_answers", description=__doc__
    )
    parser.add_argument("--write", action="store_true", help="add the answers of new cases")
    parser.add_argument(
        "--new-contract", action="store_true", help="with --write: replace answers that differ"
    )
    options = parser.parse_args(arguments)
    if not options.write:
        report = known_answers("auto")
        print(report)
        return 0 if report.ok else 1
    return _write(options.new_contract)


def _write(new_contract: bool) -> int:
    stored = read_file() if FILE.is_file() and not new_contract else {}
    before = stored.get(ARCHITECTURE, {})
    made = {case.name: answer_of(case, "reference") for case in CASES}
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
    write_file({**stored, ARCHITECTURE: made})
    print(f"{FILE}: {len(made)} answers, {len(made) - len(before)} of them new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
