"""The proof of `exactmoe verify` as one HTML page, from the object that --json prints."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exactmoe.report.html import Section, page


def proof_page(content: Mapping[str, Any]) -> str:
    """The page of a proof: verdict, machine, what was compared, other machine, errors, times."""
    machines = [content["machine"]]
    against = content.get("against")
    if against is not None:
        machines.append(against["machine"])
    sections = [
        _verdict(content),
        Section(
            "Machine" if against is None else "Machines",
            head=("", "here", f"of {against['file']}") if against else ("", "here"),
            rows=[
                (name, *(str(machine.get(name, "")) for machine in machines))
                for name in dict.fromkeys(name for machine in machines for name in machine)
            ],
        ),
        *_against(against),
        _matrix(content["reports"]),
        *_bounds(content["reports"]),
        *_not_run(content["reports"]),
        _times(content["reports"]),
    ]
    return page(f"Proof of {content['path']}", sections)


def _verdict(content: Mapping[str, Any]) -> Section:
    rows = sum(report["comparisons"] for report in content["reports"])
    nbytes = sum(report["bytes"] for report in content["reports"])
    wrong = sum(report["mismatches"] for report in content["reports"])
    text = [
        f"{'Proved' if content['ok'] else 'FAILED'}: {rows:,} rows, {nbytes:,} bytes compared on "
        f"this machine, {wrong:,} rows differ.",
        "A token must have one bit pattern whatever call it is in. Each dimension below changes "
        "something that may not change a bit, and compares the bytes.",
    ]
    against = content.get("against")
    if against is not None:
        agrees = "agrees" if against["ok"] else "DOES NOT AGREE"
        text.insert(1, f"This machine {agrees} with that of {against['file']}.")
    return Section("Verdict", text=text)


def _against(against: Mapping[str, Any] | None) -> Iterator[Section]:
    if against is None:
        return
    yield Section(
        "Beside the other machine",
        text=[
            f"{'Agree' if against['ok'] else 'DO NOT AGREE'}: {against['bytes']:,} bytes compared. "
            "Equal bits are promised for CPUs, and for cards of one exact architecture."
        ],
        head=("vector", "result", "bytes", ""),
        rows=[
            (one["name"], one["result"], one["nbytes"], one["reason"])
            for one in against["compared"]
        ],
    )


def _matrix(reports: Sequence[Mapping[str, Any]]) -> Section:
    """A row a dimension, a column a subject."""
    names = dict.fromkeys(name for report in reports for name in report["dimensions"])
    return Section(
        "What was compared",
        text=["Rows and bytes of each dimension; empty: not one of this subject's dimensions."],
        head=("dimension", *(report["subject"] for report in reports)),
        rows=[(name, *(_count(report, name) for report in reports)) for name in names],
    )


def _count(report: Mapping[str, Any], name: str) -> str:
    count = report["dimensions"].get(name)
    if count is None:
        return ""
    if count["mismatches"]:
        first = count["first"] or {}
        where = f", first: token {first['token']} of {first['width']}" if first else ""
        return f"DIFFER: {count['mismatches']:,} of {count['comparisons']:,} rows{where}"
    return f"equal: {count['comparisons']:,} rows, {count['bytes']:,} bytes"


def _bounds(reports: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    rows = [
        (report["subject"], name, str(bound["found"]), str(bound["allowed"]))
        for report in reports
        for name, bound in report["bounds"].items()
    ]
    if rows:
        head = ("subject", "what", "error", "allowed")
        yield Section("Errors against float64", head=head, rows=rows)


def _not_run(reports: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    rows = [
        (report["subject"], name, reason)
        for report in reports
        for name, reason in report["not_run"].items()
    ]
    if rows:
        yield Section("Not run here", head=("subject", "what", "why"), rows=rows)


def _times(reports: Sequence[Mapping[str, Any]]) -> Section:
    """As the matrix; a dimension that took no time anywhere is left out."""
    spent = [{**report["times"], "all": report["seconds"]} for report in reports]
    names = dict.fromkeys(name for times in spent for name in times if times[name] >= 0.005)
    return Section(
        "Seconds",
        head=("dimension", *(report["subject"] for report in reports)),
        rows=[
            (name, *(f"{times[name]:.2f}" if name in times else "" for times in spent))
            for name in sorted(names, key=lambda name: name == "all")
        ],
    )
