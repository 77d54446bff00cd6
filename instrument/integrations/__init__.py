"""Public training API of libraries, observed when they are imported. One file a library, with two constants:

LIBRARY: the name that functions are recorded under.
POINTS: module to hook on import → class → methods; an empty tuple means a function of the module.
"""

from __future__ import annotations
