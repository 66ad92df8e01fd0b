"""Checks the shape of this repository: who imports whom, file sizes, argument counts, banned marks.

Every check takes the repository's root and returns its findings, so that a test can plant a bad
tree and see it found. `python tools/structure.py` runs all of them (`make check`, pre-commit).

An import is counted wherever it stands: at the top, inside a function, under TYPE_CHECKING, or as
`importlib.import_module` with a literal name.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

PACKAGE = "exactmoe"
MAX_LINES = 400
MAX_ARGUMENTS = 8

# Top-level module or folder of the package -> level. A module imports from lower levels only, or
# from its own folder; modules that lie directly in the package may also import their level.
LEVELS = {
    "errors": 0,
    "env": 0,
    "config": 1,
    "formats": 1,
    "families": 2,
    "reference": 2,
    "kernels": 2,
    "plan": 2,
    "runtime": 2,
    "ops": 3,
    "bank": 4,
    "checkpoint": 5,
    "parallel": 5,
    "block": 6,
    "dense": 6,
    "fitting": 6,
    "linear": 6,
    "routed": 6,
    "ranked": 6,
    "ranked_dense": 6,
    "layer": 6,
    "load": 6,
    "hf": 7,
    "proof": 8,
    "bench": 8,
    "report": 8,
    "serve": 8,
    "cli": 9,
    "__main__": 10,
}
# Foreign module -> the only places of the package that may import it.
FOREIGN = {
    "triton": {"kernels", "ops"},
    "torch.distributed": {"parallel", "hf"},
    "transformers": {"hf", "families"},
}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

# Decorators of device code, whose signatures are flat: triton.jit, njit, numba's intrinsic, device.
DEVICE_CODE = re.compile(r"jit\b|\bintrinsic\b|\bdevice\b")

SIZED = ("src", "tests", "demo", "tools", "benchmarks")
SIZED_SUFFIXES = {".py", ".sh", ".cu", ".cuh", ".cpp", ".h"}
# Spelled in two parts so that this file does not find itself.
BANNED_MARKS = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")


def _files(root: Path, folders: tuple[str, ...], suffixes: set[str]) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in suffixes and "__pycache__" not in path.parts and path.is_file():
                yield path


def _trees(root: Path, folders: tuple[str, ...]) -> Iterator[tuple[Path, ast.Module]]:
    for path in _files(root, folders, {".py"}):
        yield path.relative_to(root), _parsed(path.read_text(encoding="utf-8"), str(path))


@cache
def _parsed(text: str, name: str) -> ast.Module:
    """Once for all checks, which only read it; parsing took most of their time."""
    return ast.parse(text, name)


def _package_trees(root: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    """(path, unit, tree) of each module of the package; the unit of __init__.py itself is ""."""
    for path, tree in _trees(root, (f"src/{PACKAGE}",)):
        inside = path.parts[2:]
        unit = inside[0].removesuffix(".py")
        yield path, "" if inside == ("__init__.py",) else unit, tree


def _imports(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports, relative names resolved."""
    package = list(path.with_suffix("").parts[1:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                relative = ".".join(package) if name.value.startswith(".") else ""
                yield node.lineno, relative + name.value


def import_direction(root: Path) -> list[str]:
    """A module of the package imports only from a lower level, or from its own folder."""
    found = []
    for path, unit, tree in _package_trees(root):
        if unit and unit not in LEVELS:
            found.append(f"{path}: {unit} has no level; allowed: {', '.join(LEVELS)}")
        if not unit or unit not in LEVELS:
            continue
        for line, name in _imports(path, tree):
            parts = name.split(".")
            if parts[0] != PACKAGE:
                continue
            target = parts[1] if len(parts) > 1 else ""
            if target not in LEVELS:
                # The package root re-exports everything, so it counts as high as the commands.
                if LEVELS[unit] < LEVELS["cli"]:
                    found.append(f"{path}:{line} imports {name}: the public surface is for users")
            elif target != unit and not _may_import(root, unit, target):
                found.append(
                    f"{path}:{line} imports {name}: {unit} is level {LEVELS[unit]}, "
                    f"{target} is level {LEVELS[target]}"
                )
    return found


def _may_import(root: Path, unit: str, target: str) -> bool:
    if LEVELS[target] != LEVELS[unit]:
        return LEVELS[target] < LEVELS[unit]
    return all((root / "src" / PACKAGE / f"{name}.py").is_file() for name in (unit, target))


def foreign_imports(root: Path) -> list[str]:
    """triton, torch.distributed and transformers are imported only where FOREIGN says."""
    found = []
    for path, unit, tree in _package_trees(root):
        uses = list(_imports(path, tree)) + list(_attribute_chains(tree))
        for foreign, allowed in FOREIGN.items():
            lines = {line for line, name in uses if f"{name}.".startswith(f"{foreign}.")}
            if lines and unit not in allowed:
                places = " and ".join(sorted(f"{name}/" for name in allowed))
                found += [f"{path}:{n} uses {foreign}: only {places} may" for n in sorted(lines)]
    return found


def _attribute_chains(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def environment_use(root: Path) -> list[str]:
    """The process environment is read and written in env.py only."""
    found = []
    for path, unit, tree in _package_trees(root):
        if unit == "env":
            continue
        uses = list(_imports(path, tree)) + list(_attribute_chains(tree))
        banned = {f"os.{name}" for name in ENVIRONMENT}
        lines = {line for line, name in uses if name in banned}
        found += [f"{path}:{n} uses the environment: only env.py may" for n in sorted(lines)]
    return found


def file_size(root: Path) -> list[str]:
    """No source file is longer than MAX_LINES."""
    found = []
    for path in _files(root, SIZED, SIZED_SUFFIXES):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_LINES:
            found.append(f"{path.relative_to(root)}: {lines} lines, {MAX_LINES} are allowed")
    return found


def argument_count(root: Path) -> list[str]:
    """No function takes more than MAX_ARGUMENTS; self is not one; device code is exempt."""
    found = []
    for path, tree in _trees(root, SIZED):
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if any(DEVICE_CODE.search(ast.unparse(mark)) for mark in node.decorator_list):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len(arguments) - bool(arguments and arguments[0].arg in {"self", "cls"})
            if count > MAX_ARGUMENTS:
                found.append(
                    f"{path}:{node.lineno} {node.name} takes {count} arguments, "
                    f"{MAX_ARGUMENTS} are allowed: a struct is missing"
                )
    return found


def swallowed_exceptions(root: Path) -> list[str]:
    """No bare `except:`, and nothing catches every exception only to drop it."""
    found = []
    for path, tree in _trees(root, SIZED):
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                if node.type is None:
                    found.append(f"{path}:{node.lineno} bare except: name the exception")
                elif _catches_all(node.type) and all(map(_does_nothing, node.body)):
                    found.append(f"{path}:{node.lineno} swallows every exception")
            elif isinstance(node, ast.Call) and _suppresses_all(node):
                found.append(f"{path}:{node.lineno} swallows every exception")
    return found


def _catches_all(caught: ast.expr) -> bool:
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(ast.unparse(name) in {"Exception", "BaseException"} for name in names)


def _suppresses_all(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith("suppress") and any(map(_catches_all, call.args))


def _does_nothing(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or isinstance(statement, ast.Pass | ast.Continue)


def banned_marks(root: Path) -> list[str]:
    """Work left undone is an issue, not a mark in the source."""
    found = []
    for path in _files(root, SIZED, SIZED_SUFFIXES):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if mark := BANNED_MARKS.search(text):
                found.append(f"{path.relative_to(root)}:{number} says {mark.group()}")
    return found


def design_tree(root: Path) -> list[str]:
    """Each file and folder named in the tree of docs/design.md exists.

    The tree is the fence whose first line is src/exactmoe/. The first word of a line, after an
    optional level such as `L2`, is a path. A line that stands further right than a folder above
    it lies in that folder; all others lie at the root or in src/exactmoe.
    """
    design = root / "docs" / "design.md"
    if not design.is_file():
        return []
    lines = design.read_text(encoding="utf-8").splitlines()
    first = f"src/{PACKAGE}/"
    found = [] if first in lines else [f"docs/design.md has no fence that begins with {first}"]
    folders: list[tuple[int, Path]] = []
    inside = False
    for number, text in enumerate(lines, start=1):
        if text.startswith("```"):
            inside, folders = not inside and lines[number : number + 1] == [first], []
        entry = re.match(r"(?:L\d+ )?([ │├└─]*)([\w./-]+)(?:\s|$)", text) if inside else None
        if entry is None:
            continue
        indent, name = entry.start(2), entry.group(2)
        folders = [(column, folder) for column, folder in folders if column < indent]
        bases = [folders[-1][1]] if folders else [root, root / "src" / PACKAGE]
        path = next((base / name for base in bases if (base / name).exists()), None)
        if path is None:
            found.append(f"docs/design.md:{number} names {name}, which does not exist")
        elif path.is_dir():
            folders.append((indent, path))
    return found


CHECKS: tuple[Callable[[Path], list[str]], ...] = (
    import_direction,
    foreign_imports,
    environment_use,
    file_size,
    argument_count,
    swallowed_exceptions,
    banned_marks,
    design_tree,
)


def main() -> int:
    """Runs every check on this repository; the exit status is 1 when one found something."""
    root = Path(__file__).resolve().parent.parent
    found = [finding for check in CHECKS for finding in check(root)]
    print("\n".join(found) or f"structure: {len(CHECKS)} checks passed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
