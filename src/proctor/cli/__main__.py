"""`python -m proctor.cli`, where the console script is not on the path."""

from __future__ import annotations

import sys

from proctor.cli import main

sys.exit(main())
