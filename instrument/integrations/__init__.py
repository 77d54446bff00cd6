"""Public training API of libraries, observed when they are imported. One file a library, with three constants:

LIBRARY: the name that functions are recorded under.
TRIED: the oldest and the newest version that the tests ran with. An older one, or one of a later major version, is noted in the run.
POINTS: module to hook on import → class → methods; an empty tuple means a function of the module.

What an installed version lacks of them is noted as unobserved, so that a rule about its absence is unknown.
"""

from __future__ import annotations
