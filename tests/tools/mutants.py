"""A fixed list of small faults in the engine: does the suite notice them?

    python tests/tools/mutants.py list        # 150 faults, the same for the same engine
    python tests/tools/mutants.py run [N ..]  # break a copy of the project, and test it

Run it by hand, as it takes hours. A fault is caught if a test fails, or does not end in
time. The tests that know a file best come first, then all. Triton's kernels run
in the interpreter. What is NOT CAUGHT either changes nothing that anybody could see, or
a test is missing.
"""

import ast
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNT, SEED, SECONDS = 150, 1, 900
FIRST = {  # where it is not the test of the same name
    "paged_attention": "attention", "beam_search": "beams", "batch": "scheduler",
    "prefix_cache": "block_manager", "checks": "errors", "config": "errors",
    "engine": "requests", "sequence": "requests", "model": "equivalence",
    "fused": "equivalence", "model_runner": "equivalence", "cpu": "attention",
    "gpu": "gpu_path", "loading": "loader", "frontend": "text"}
FOLDERS = ("cpu", "gpu", "loading", "frontend")
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.And: ast.Or,
    ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
RENAMED = {"min": "max", "max": "min", "any": "all", "all": "any"}


def change(node):
    """A changed copy of a node, as text; None if it has nothing to change."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        operator = SWAPPED[type(node.ops[0])]()
        node = ast.Compare(node.left, [operator, *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        node = ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        node = ast.BoolOp(SWAPPED[type(node.op)](), node.values)
    elif isinstance(node, ast.Name) and node.id in RENAMED:
        node = ast.Name(RENAMED[node.id])
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        node = ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        node = ast.Constant(node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        node = node.operand
    elif isinstance(node, (ast.Expr, ast.AugAssign)) and not isinstance(
            getattr(node, "value", None), ast.Constant):
        return "pass"
    else:
        return None
    return f"({ast.unparse(node)})" if isinstance(node, ast.expr) else ast.unparse(node)


def faults(count=COUNT):
    """File, line, old text, new text, and the whole new source of each."""
    found = []
    package = ROOT / "nanopaged"
    for path in sorted(path for folder in ("", *FOLDERS)
                       for path in (package / folder).glob("*.py")):
        source = path.read_text()
        starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
        for function in ast.walk(ast.parse(source)):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in itertools.chain(*map(ast.walk, function.body)):
                new, old = change(node), ast.get_source_segment(source, node)
                if new and old:
                    start = starts[node.lineno - 1] + node.col_offset
                    broken = source[:start] + new + source[start + len(old) :]
                    name = path.relative_to(package).as_posix()
                    found.append((name, node.lineno, old, new, broken))
    # Most are still chosen after a small change of the engine.
    found.sort(key=lambda f: random.Random(f"{SEED} {f[0]} {f[2:4]}").random())
    return sorted(found[:count])


def is_caught(fault):
    name, *_, broken = fault
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "results"))
        (copy / "nanopaged" / name).write_text(broken)
        env = os.environ | {"PYTHONPATH": str(copy)}
        known_as = name.removesuffix(".py").partition("/")[0]
        first = f"tests/test_{FIRST.get(known_as, known_as)}.py"
        for tests in (first, "tests"):
            command = [sys.executable, "-m", "pytest", "-q", "-x", tests]
            try:
                result = subprocess.run(command, cwd=copy, env=env, timeout=SECONDS,
                                        capture_output=True)
            except subprocess.TimeoutExpired:
                return True
            if result.returncode:
                return True
    return False


def main(command="list", *numbers):
    chosen = list(enumerate(faults()))
    for number, fault in [chosen[int(n)] for n in numbers] or chosen:
        name, line, old, new, _ = fault
        verdict = ""
        if command == "run":
            verdict = "caught" if is_caught(fault) else "NOT CAUGHT"
        label = f"{number:3} {name}:{line}: {old!r:.60} -> {new!r:.60}"
        print(label, verdict, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
