"""The support table of README.md: every cell is tried (see support.py), then written down.

`python tests/helpers/support_table.py --write` writes it, which takes half a minute.
"""

import argparse
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory

from support import FAMILIES, NO_MTP, PARTS, REASONS, Outcome, outcome

README = Path(__file__).parents[2] / "README.md"
README_WIDTH = 125
BEGIN, END = "<!-- support table -->\n", "<!-- end -->\n"
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
_WORDS = {"load_layer": "`load_layer`", "load_layer in a16": "`load_layer` in `a16`"}


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


def written() -> str:
    """What README.md has between the markers."""
    return README.read_text().partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    """Prints the table, or writes it into README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write it into README.md")
    write = parser.parse_args().write
    found = table([row(label) for label in ROWS])
    if not write:
        print(found)
        return
    before, begin, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{README} has no {BEGIN.strip()} ... {END.strip()}")
    README.write_text(before + begin + found + end + after)


if __name__ == "__main__":
    main()
