"""Registers of matrix instructions on their way: nobody may write them before they are waited for.

wgmma reads its A registers while later instructions run. The compiler sees to them up to the next
branch only, so a kernel that makes operands behind one can be wrong without a word (it was).
"""

import re

from cuda_code import Code, name

# Instructions whose first operand is not written.
_WRITES_NONE = re.compile(r"ST|BRA|SYNCS|RED|UBLKCP|BAR|WARPGROUP|DEPBAR|EXIT|ELECT|R2UR")
_FAR = 900  # instructions behind which everything has been waited for


def overwritten(machine: Code) -> list[str]:
    """Instructions that write A registers of a matrix instruction that may still read them."""
    places = {address: place for place, address in enumerate(machine.addresses)}
    found = []
    for place, text in enumerate(machine.main):
        match = re.search(r"GMMA\S* R\d+, R(\d+), gdesc", text)
        if match is None:
            continue
        registers = set(range(int(match[1]), int(match[1]) + 4))
        groups, at = 0, place
        for _ in range(_FAR):
            groups += "gsb0" in machine.main[at] and "GMMA" in machine.main[at]
            at += 1
            if at == len(machine.main):
                break
            other = machine.main[at]
            waits = re.search(r"DEPBAR\.LE gsb0, 0x(\d+)", other)
            if waits is not None and groups > int(waits[1]):
                break
            if "GMMA" not in other and registers & written(other):
                found.append(f"{text} | {other}")
                break
            jump = re.fullmatch(r"BRA (?:!?U?P\d+, )?0x([0-9a-f]+)", other)
            if jump is not None and int(jump[1], 16) < machine.addresses[at]:
                at = places[int(jump[1], 16)] - 1  # around a loop
    return found


def written(text: str) -> set[int]:
    """Numbers of the registers that an instruction writes."""
    match = re.match(r"\S+ (?:P\d+, |PT, )*R(\d+)", text)
    operation = name(text)
    if match is None or _WRITES_NONE.match(operation):
        return set()
    count = 1
    if ".64" in operation or "WIDE" in operation or operation.startswith("CS2R"):
        count = 2
    if ".128" in operation:
        count = 4
    return set(range(int(match[1]), int(match[1]) + count))
