"""List, show and re-execute capsules: single training steps that were kept because something was wrong with them.

    proctor capsule list RUN
    proctor capsule show CAPSULE [--all]
    proctor capsule replay CAPSULE [--timeout S] [--format json] [-- CMD…]
    proctor capsule origin CAPSULE [--timeout S] [--format json] [-- CMD…]

`replay` starts the recorded command (or CMD) twice, makes its first training step that of the capsule, and compares what
comes out with the record. The program runs up to its first training step, with all that it does until then: give a CMD
that writes elsewhere if it must not touch its earlier results. `origin` starts it once, sees every operation of the step, and says where the
first NaN or infinity comes from.

exit code of replay: 0 reproduced (the cause is in code or data), 1 differs (the device errs, or the code is not
deterministic), 2 bad usage or input, 3 nothing can be said; of origin: 0 all is finite, 1 found, 2 and 3 likewise
"""

from __future__ import annotations

from proctor.cli._parts.actions import actions

prepare, run = actions(__name__, __path__)
