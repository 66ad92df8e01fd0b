"""The support tables of README.md: every cell is tried (support.py, experts_classes.py), then
written down.

`python tests/helpers/support_table.py --write` writes them, which takes half a minute.
"""

import argparse
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import experts_classes
from exactmoe.plan import ARCHITECTURES
from support import FAMILIES, NO_MTP, PARTS, REASONS, Outcome, outcome

README = Path(__file__).parents[2] / "README.md"
README_WIDTH = 125
PARTS_BEGIN, CLASSES_BEGIN = "<!-- support table -->\n", "<!-- experts classes -->\n"
ARCHITECTURES_BEGIN = "<!-- architectures -->\n"
END = "<!-- end -->\n"
CLASSES_TITLE = '| `experts_implementation="exactmoe"` | model types of transformers |'
SHORT = {"glm5_next": "GLM", "deepseek_v4": "DeepSeek"}
# Row -> dialects, which all have the same outcomes.
ROWS = {
    "ModelOpt NVFP4, NVIDIA's DeepSeek-V4 too": ("ModelOpt NVFP4",),
    "compressed-tensors NVFP4": ("compressed-tensors NVFP4",),
    "compressed-tensors MXFP4": ("compressed-tensors MXFP4",),
    "DeepSeek-V4's MXFP4": ("DeepSeek MXFP4",),
    "FP8 128x128: `weight_scale_inv`, `weight_scale`, `scale`": (
        "FP8 128x128 with weight_scale_inv",
        "FP8 128x128 with weight_scale",
        "FP8 128x128 with scale",
    ),
    "BF16": ("BF16",),
    "F32": ("F32",),
    "NVFP4, MXFP4, BF16, all experts in one tensor": (
        "stacked NVFP4",
        "stacked MXFP4",
        "stacked BF16",
    ),
    "gpt-oss MXFP4": ("gpt-oss MXFP4",),
}
NOTES = tuple(dict.fromkeys((NO_MTP, *REASONS.values())))
_WORDS = {
    "in a16": "in `a16`",
    "load_layer": "`load_layer`",
    "load_layer in a16": "`load_layer` in `a16`",
}


def row(label: str) -> str:
    """One line of the table, every cell tried."""
    with TemporaryDirectory() as folder:
        cells = [_cell(label, part, Path(folder) / "checkpoint") for part in PARTS]
    return f"| {label} | {' | '.join(cells)} |"


def _cell(label: str, part: str, folder: Path) -> str:
    """What all dialects of the row have; the families apart where they differ."""
    texts = {}
    for family in FAMILIES:
        found = {_text(outcome(dialect, part, family, folder)) for dialect in ROWS[label]}
        assert len(found) == 1, f"{label} is one row, but its {part} ({family}): {found}"
        texts[family] = found.pop()
    texts = {family: text for family, text in texts.items() if text}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{SHORT[family]}: {text}" for family, text in texts.items())


def _text(found: Outcome | None) -> str:
    if found is None:
        return ""
    note = f" ({_letter(found.reason)})" if found.reason else ""
    return _WORDS.get(found.word, found.word) + note


def _letter(reason: str) -> str:
    return "abcdefghij"[NOTES.index(reason)]


def table(rows: list[str]) -> str:
    """The whole text between the markers, from the lines of all rows."""
    titles = (f"{part} (GLM)" if part == "dense MLP" else part for part in PARTS)
    notes = "; ".join(f"({_letter(reason)}) {reason}" for reason in NOTES) + "."
    head = [f"| stored as | {' | '.join(titles)} |", "|---" * (len(PARTS) + 1) + "|"]
    return "\n".join([*head, *rows, "", *textwrap.wrap(notes, README_WIDTH), ""])


def classes_table(outcomes: Mapping[str, str]) -> str:
    """The table of experts classes, from model type -> what `experts_classes.outcome` gave."""
    lines = [CLASSES_TITLE, "|---|---|"]
    for label in (experts_classes.RUNS, *experts_classes.REASONS.values()):
        types = ", ".join(name for name in experts_classes.MODEL_TYPES if outcomes[name] == label)
        if types:
            title = label if label == experts_classes.RUNS else f"refused: {label}"
            lines.append(f"| {title} | {types} |")
    return "\n".join([*lines, ""])


def architectures_table() -> str:
    """The table of devices: what is known of each architecture."""
    lines = ["| architecture | cards | backends | support |", "|---|---|---|---|"]
    lines.append("| CPU | x86-64, ARM64 | cpu, reference | measured |")
    for row in ARCHITECTURES.values():
        backends = ", ".join(row.backends)
        lines.append(f"| {row.name} | {row.cards} | {backends} | {row.support} |")
    lines.append("| others | | | no |")
    return "\n".join([*lines, ""])


def written_classes() -> dict[str, str]:
    """Model type -> what README.md says of it."""
    outcomes: dict[str, str] = {}
    for line in written(CLASSES_BEGIN).splitlines()[2:]:
        _, title, types, _ = (cell.strip() for cell in line.split("|"))
        outcomes |= dict.fromkeys(types.split(", "), title.removeprefix("refused: "))
    return outcomes


def written(begin: str = PARTS_BEGIN) -> str:
    """What README.md has between a marker and the next end."""
    return README.read_text().partition(begin)[2].partition(END)[0]


def _write(begin: str, text: str) -> None:
    before, marker, rest = README.read_text().partition(begin)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{README} has no {begin.strip()} ... {END.strip()}")
    README.write_text(before + marker + text + end + after)


def _classes() -> dict[str, str]:
    outcomes = {name: experts_classes.outcome(name) for name in experts_classes.MODEL_TYPES}
    absent = [name for name, found in outcomes.items() if found is None]
    if absent:
        sys.exit(f"this transformers has no {', '.join(absent)}; write the table with a newer one")
    return {name: found for name, found in outcomes.items() if found is not None}


def main() -> None:
    """Prints the tables, or writes them into README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write it into README.md")
    write = parser.parse_args().write
    found = {
        PARTS_BEGIN: table([row(label) for label in ROWS]),
        CLASSES_BEGIN: classes_table(_classes()),
        ARCHITECTURES_BEGIN: architectures_table(),
    }
    for begin, text in found.items():
        if write:
            _write(begin, text)
        else:
            print(text)


if __name__ == "__main__":
    main()
