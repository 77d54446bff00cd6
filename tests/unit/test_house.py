"""Sizes that a reader can hold: files, classes and folders; what is larger says why, beside it. And what may stand in one file alone.

A file says `# More than 400 lines: …` near its head, a class `# More than 25 methods: …` on the line above. Folders are named, with the reason, in
the paragraph of docs/design.md that begins "A folder has at most fifteen files".
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES, MAX_METHODS, MAX_FILES = 400, 25, 15
LARGE_FILE = re.compile(r"^# More than 400 lines: \w", re.MULTILINE)
LARGE_CLASS = re.compile(r"# More than 25 methods: \w")


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout")
    return [name for name in listed.stdout.splitlines() if name.endswith((".py", ".cpp", ".h")) and (ROOT / name).exists()]


def excused_folders() -> set[str]:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    paragraph = text[text.index("A folder has at most fifteen files") :].split("\n\n")[0]
    return {name.rstrip("/") for name in re.findall(r"`([\w/]+/)`", paragraph)}


def large_classes(text: str) -> list[str]:
    """Classes with too many methods that do not say why."""
    lines, found = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for n in node.body)
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if methods > MAX_METHODS and not LARGE_CLASS.match(lines[first - 2].strip()):
                found.append(f"{node.name} has {methods} methods")
    return found


def test_no_file_is_too_long() -> None:
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in tracked() if name.endswith(".py")}
    assert len(texts) > 500
    long = {name: text for name, text in texts.items() if text.count("\n") > MAX_LINES}
    assert [name for name, text in long.items() if not LARGE_FILE.search(text[:4000])] == []


def test_no_class_does_too_much() -> None:
    found = {name: large_classes((ROOT / name).read_text(encoding="utf-8")) for name in tracked() if name.endswith(".py")}
    assert {name: classes for name, classes in found.items() if classes} == {}


def test_a_large_class_is_noticed_unless_it_says_why() -> None:
    text = "class Large:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(MAX_METHODS + 1))
    assert large_classes(text) == ["Large has 26 methods"]
    assert large_classes("# More than 25 methods: those of a protocol.\n" + text) == []
    assert large_classes("# More than 25 methods: \n" + text) == ["Large has 26 methods"]


def test_no_folder_has_too_many_files() -> None:
    folders = Counter(str(PurePath(name).parent) for name in tracked())
    excused = excused_folders()
    assert {name: n for name, n in folders.items() if n > MAX_FILES and name not in excused} == {}


def test_no_two_files_of_tests_have_one_name() -> None:
    """They are modules of one name to pytest, which then collects one of them alone."""
    names = Counter(PurePath(name).name for name in tracked() if PurePath(name).name.startswith("test_"))
    assert len(names) > 300
    assert [name for name, n in names.items() if n > 1] == []


def test_variables_of_the_program_are_read_in_one_place_which_lets_go_of_them() -> None:
    readers = [name for name in tracked() if name.startswith("instrument/") and "f_locals" in (ROOT / name).read_text(encoding="utf-8")]
    assert readers == ["instrument/probes/source/reading.py"], "use reading.scope_of and reading.release"


def test_no_array_shares_memory_with_a_tensor_of_the_program() -> None:
    """It would fix the tensor's size: `resize_` raises from then on."""
    shared = re.compile(r"\.numpy\(\)|\bn(um)?py\.(as)?array\(|\bnp\.asarray\(|__array__|dlpack")
    readers = {name: found for name in tracked() if name.startswith("instrument/") and (found := shared.findall((ROOT / name).read_text(encoding="utf-8")))}
    allowed = {"instrument/observe/content.py": "array_of", "instrument/capsules/render.py": "of our own copies", "instrument/replay/inside.py": "of another process", "instrument/output.py": "of a trace"}
    assert sorted(readers.keys() - allowed.keys()) == [], "use content.array_of"
