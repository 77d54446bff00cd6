"""Inside the recorded process: started by the hook that `proctor oracle record` puts on PYTHONPATH."""

from __future__ import annotations

from pathlib import Path


def install_from(activation: str) -> None:
    """Begin to watch this process, as the file says.

    Raises:
        OracleError: the file is damaged.
    """
    from proctor.oracle.collect.collector import Collector
    from proctor.oracle.collect.config import read_config

    Collector(read_config(Path(activation))).install()
