"""Try, inspect and silence the pages of a job.

  proctor page test --config page.toml        send a TEST incident to every sink: begin, acknowledge, end
  proctor page status --run RUN               what waits, what was sent, what was not and why
  proctor page flush --run RUN --config page.toml   send now what waits
  proctor page mute --run RUN --for 2h --reason TEXT   tell nobody for a while
  proctor page unmute --run RUN [ID]          tell people again

A muted incident that is not over when the mute ends is told then. docs/paging.md describes page.toml.
"""

from __future__ import annotations

from proctor.cli._parts.actions import actions

prepare, run = actions(__name__, __path__)
