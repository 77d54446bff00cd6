"""Compare a run with a trusted reference: is it the same computation, and where does it begin to differ.

  proctor oracle record -o DIR -- CMD       record the first step of a command, unchanged
  proctor oracle compare REF CAND           is the candidate the reference's computation? exit code 0, 1, or 3
  proctor oracle run --reference "…" --candidate "…"   both, and the place where they part
  proctor oracle localise REF CAND          which module is wrong, in which direction, at which operation
  proctor oracle plan PLAN [RECORDING]      what a plan says, and what it forgets
  proctor oracle self -- CMD                no reference? the program is its own, under changes that must not matter
  proctor oracle fuzz --budget 10m             look for bugs in a distributed library itself: generated models under generated settings
  proctor oracle prove --reference "…" --candidate "…"   is it the same formula, for all data? 0, 1, or 3
  proctor oracle replay CAPSULE --reference "…"        was a step that `watch` kept what the reference computes? 0, 1, or 3
"""

from __future__ import annotations

from proctor.cli._parts.actions import actions

prepare, run = actions(__name__, __path__)
