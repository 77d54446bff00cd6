"""Checkouts of public repositories in a folder of the user's: what lies there is used, what is missing is fetched by git."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.wild.manifest import Project

_LONGEST_S = 900


def checkout(project: Project, folder: Path) -> tuple[Path | None, str]:
    """The project's folder, and a remark; `None` when it cannot be had.

    A checkout that is already there is not changed, and one of another commit is said.
    """
    place = folder / project.name
    if not place.is_dir():
        steps = [
            ["git", "clone", "--quiet", "--filter=blob:none", "--no-checkout", project.repository, str(place)],
            ["git", "-C", str(place), "checkout", "--quiet", "--detach", project.commit],
        ]
        for command in steps:
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S)
            except (OSError, subprocess.TimeoutExpired) as error:
                return None, f"{project.name}: git did not fetch it: {error}"
            if done.returncode:
                return None, f"{project.name}: git did not fetch it: {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}"
    head = subprocess.run(["git", "-C", str(place), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    if head != project.commit:
        return place, f"{project.name}: the checkout is at {head[:12] or 'no commit'}, the manifest says {project.commit[:12]}"
    return place, ""
