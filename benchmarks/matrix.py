"""Which versions of Python and torch work: an environment of each pair, the package built and installed, and the suite's fast half.

    python benchmarks/matrix.py [--python 3.11 3.12 3.13] [--torch 2.3 2.13.0] [--tests tests/unit] [--write]

Interpreters are looked for on PATH, below ~/.pyenv/versions, and by `uv python find`. A pair that no wheel of torch exists for is said so. An
environment that is there is used again (out/matrix). `--write` puts the table into docs/versions.md. A pair without a result is no promise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- matrix -->", "<!-- /matrix -->"
TESTING = ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100", "prometheus-client", "starlette", "uvicorn", "aiosmtpd",
           "nats-py", "dask[distributed]", "tensorboard", "scikit-learn"]


def oldest_torch() -> str:
    """That pyproject.toml promises."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = re.search(r">=([\d.]+)", extras["torch"][0])
    assert found is not None
    return found.group(1)


def interpreter(version: str) -> str | None:
    """A Python of this minor version that starts."""
    places = [shutil.which(f"python{version}"), *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is not None:
        places.append(subprocess.run([uv, "python", "find", version], capture_output=True, text=True, check=False).stdout.strip())
    for place in filter(None, places):
        said = subprocess.run([str(place), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout.strip() == version:
            return str(place)
    return None


def cell(version: str, torch: str, tests: list[str], jobs: int) -> dict[str, str]:
    """One pair: what came of it, in words."""
    row = {"python": version, "torch": torch}
    python = interpreter(version)
    if python is None:
        return {**row, "result": "no interpreter here"}
    folder = ROOT / "out" / "matrix" / f"{version}-{torch}"
    mine = str(folder / "bin" / "python")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def step(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([mine, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    if not Path(mine).exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    spec = f"torch=={torch}" + (".*" if torch.count(".") == 1 else "")
    old = tuple(int(n) for n in torch.split(".")[:2]) < (2, 4)  # built against numpy 1
    if (done := step("-m", "pip", "install", "-q", spec, "numpy<2" if old else "numpy")).returncode:
        why = "no wheel of torch" if "No matching distribution" in done.stderr else "torch was not installed"
        return {**row, "result": why}
    if (done := step("-m", "pip", "install", "-q", ".", *TESTING)).returncode:
        return {**row, "result": f"not installed: {done.stderr.strip().splitlines()[-1][:120]}"}
    said = step("-c", "import json, sys, torch, proctor.native as n; print(json.dumps([sys.version.split()[0], torch.__version__, n.ACTIVE]))")
    if said.returncode:
        return {**row, "result": f"does not import: {said.stderr.strip().splitlines()[-1][:120]}"}
    row["python"], row["torch"], row["extension"] = json.loads(said.stdout)
    begin = time.monotonic()
    done = step("-m", "pytest", "-n", str(jobs), "--no-header", "-p", "no:cacheprovider", *tests)
    last = next((line for line in reversed(done.stdout.splitlines()) if " passed" in line or " failed" in line or " error" in line), "no result")
    (folder / "tests.txt").write_text(done.stdout + done.stderr)
    return {**row, "result": re.sub(r"=+|in .*", "", last).strip(), "minutes": f"{(time.monotonic() - begin) / 60:.0f}"}


def table(rows: list[dict[str, str]], tests: list[str]) -> str:
    lines = [f"Made {time.strftime('%Y-%m-%d')} by `make matrix`, tests: `{' '.join(tests)}`.", "", "| Python | torch | extension | tests |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {r['python']} | {r['torch']} | {r.get('extension', '')} | {r['result']} |" for r in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=["3.11", "3.12", "3.13"])
    parser.add_argument("--torch", nargs="+", default=[oldest_torch(), "2.13.0"])
    parser.add_argument("--tests", nargs="+", default=["tests/unit"])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows = []
    for version in args.python:
        for torch in args.torch:
            rows.append(cell(version, torch, args.tests, args.jobs))
            print(json.dumps(rows[-1]), flush=True)
    text = table(rows, args.tests)
    print(text)
    if args.write:
        page = PAGE.read_text()
        PAGE.write_text(page[: page.index(BEGIN) + len(BEGIN)] + f"\n{text}\n" + page[page.index(END) :])
    return 0


if __name__ == "__main__":
    sys.exit(main())
