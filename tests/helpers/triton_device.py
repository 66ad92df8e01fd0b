"""Where Triton kernels run in tests: compiled on the card when there is one, else interpreted.

Call `use_triton()` in the conftest of a folder whose tests launch kernels, before any of them is
imported. It does not leave TRITON_INTERPRET in the environment: triton reads it when a kernel is
decorated, and the programs that other tests start must not see it. A process that has interpreted
a kernel cannot compile one any more, so tests of compiled code start their own.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quick_interpreter import quicken

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"
_KERNELS = "exactmoe.kernels.triton"


def use_triton() -> None:
    """Makes the package's kernels, when they are imported next, run on DEVICE."""
    if not INTERPRETED or os.environ.get("TRITON_INTERPRET") == "1":
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
        import triton.experimental.gluon  # a launch does; it looks at the standard functions

        _interpret_standard_functions()
        quicken()
        _patch_the_language_once_a_launch()
        for name in _kernel_modules():
            __import__(name)
            for value in vars(sys.modules[name]).values():
                assert not isinstance(value, triton.JITFunction), f"{name} is compiled already"
    finally:
        del os.environ["TRITON_INTERPRET"]


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit for a kernel of a test."""
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(function) if INTERPRETED else triton.jit(function)


def mark_tests(items: list[pytest.Item], folder: Path) -> None:
    """On a machine with a card the tests below `folder` are GPU tests; without one, numpy does the
    arithmetic and warns of every Inf and NaN.
    """
    quiet = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
    for item in items:
        if folder in item.path.parents:
            item.add_marker(quiet if INTERPRETED else pytest.mark.gpu)


def _interpret_standard_functions() -> None:
    """tl.sum and its kin were decorated when another library imported triton."""
    import triton
    from triton import language
    from triton.runtime.interpreter import InterpretedFunction

    interpreted = {}
    for module in (language.standard, language):
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction):
                new = interpreted.setdefault(value.fn, InterpretedFunction(value.fn))
                setattr(module, name, new)


def _patch_the_language_once_a_launch() -> None:
    """The interpreter does it in every call of a device function, which takes most of its time."""
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        launch(self, *arguments, **options)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        names = id(self.fn.__globals__)
        if names not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(names)
        return self.rewrite()(*arguments, **options)

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter.InterpretedFunction.__call__ = call


def _kernel_modules() -> list[str]:
    import exactmoe.kernels.triton as package

    folder = package.__path__[0]
    files = sorted(name for name in os.listdir(folder) if name.endswith(".py"))
    return [f"{_KERNELS}.{name[:-3]}" for name in files if name != "__init__.py"]
