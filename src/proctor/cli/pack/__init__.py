"""List, show, compare, merge, suppress and lint packs of rules.

  proctor pack list [PACK…]         what packs there are, the shipped ones by default
  proctor pack show PACK            the rules of a pack in English
  proctor pack lint PACK…           what is wrong with a pack; exit code 1 if anything is
  proctor pack merge A B… -o C      one pack of several
  proctor pack diff A B             what changed from one pack to another; exit code 1 if anything did
  proctor pack suppress PACK ID     do not report violations of a rule, for a reason, until a day
  proctor pack stamp PACK           write down what a pack is for and how quiet it was
"""

from __future__ import annotations

from proctor.cli._parts.actions import actions

prepare, run = actions(__name__, __path__)
