"""Kernels of sm_90 that may start early: none lets the next one start before it has waited itself.

Only then does the end of each mean the end of everything before it (kernels/triton/early.py).
"""

from importlib.resources import files

import pytest

WAIT, START = "wait_for_earlier_kernels();", "let_later_kernels_start();"
KERNELS = ("dense.cu", "experts.cu", "pack.cu", "pack_a8.cu")


@pytest.mark.parametrize("name", KERNELS)
def test_the_next_kernel_starts_right_behind_the_wait(name):
    text = (files("exactmoe.kernels.cuda") / name).read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines()]
    assert lines.count(START) == 1
    assert lines[lines.index(START) - 1] == WAIT


def test_these_are_all():
    found = {
        file.name
        for file in files("exactmoe.kernels.cuda").iterdir()
        if file.name.endswith((".cu", ".cuh")) and START in file.read_text(encoding="utf-8")
    }
    assert found == set(KERNELS)
