"""An analysis box has no torch: everything but the recorder works there."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from helpers.loops import loop
from helpers.runs import write_run

NO_TORCH = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] == "torch" else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def test_infer_and_check_run_without_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [loop(steps=6)])
    program = NO_TORCH + textwrap.dedent(f"""
        import pkgutil, importlib
        import proctor.infer, proctor.verify, proctor.invariants, proctor.native
        for room in (proctor.infer, proctor.verify, proctor.invariants, proctor.native):
            for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
                importlib.import_module(module.name)
        from proctor.cli import main
        run, pack = {str(tmp_path / 'run')!r}, {str(tmp_path / 'pack.json')!r}
        assert main(["infer", "-q", run, "-o", pack]) == 0
        assert main(["check", run, "-i", pack]) in (0, 3)
        assert "torch" not in sys.modules
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
