"""Dormant start-up hook that `proctor record` puts first on PYTHONPATH, as a copy in the run directory.

It chains to the user's own sitecustomize, then waits for `import torch`. A process that never imports torch pays for
reading this file and nothing else; one that imports torch but never trains records nothing (`instrument/observer.py`).
Whatever goes wrong here is one line on stderr: the user's program starts regardless.
"""

import os
import stat
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))

try:
    _STDERR: os.stat_result | None = os.fstat(2)  # before the program has closed it, and a file of its own got the number
except OSError:
    _STDERR = None
_HELPERS = ("multiprocessing.resource_tracker", "torch._inductor.compile_worker", "multiprocessing.forkserver")


def _chain() -> None:
    """Run the sitecustomize that this one shadows, if there is one."""
    import importlib.machinery
    import importlib.util

    path = [p for p in sys.path if os.path.abspath(p or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _say(text: str) -> None:
    """One line on stderr, while the same file is behind it, or one that is no text's (a terminal)."""
    try:
        now = os.fstat(2)
        if stat.S_ISCHR(now.st_mode) or (_STDERR is not None and os.path.samestat(now, _STDERR)):
            print(f"proctor: not recording: {text}", file=sys.stderr)
    except (OSError, ValueError):
        pass


def _is_helper() -> bool:
    return any(name in argument for argument in sys.orig_argv for name in _HELPERS)


def _activate() -> None:
    if os.environ.get("PROCTOR_DISABLE") == "1" or _is_helper():
        return
    activation = os.path.join(_HERE, "activation.json")
    if not os.path.isfile(activation):
        return
    import wrapt

    def on_torch(module: object) -> None:
        try:
            if "PROCTOR_SELF_VARY" in os.environ:  # a self-check that varies the program's configuration, before anyone looks at it
                from proctor.oracle.selfcheck.adapters import install

                install()
            if "PROCTOR_SELF" in os.environ:
                from proctor.oracle.selfcheck.watching.watch import install_from
            elif "PROCTOR_PROVE" in os.environ:
                from proctor.oracle.prove.attach import install_from
            elif "PROCTOR_ORACLE" in os.environ:
                from proctor.oracle.collect import install_from
            else:
                from proctor.instrument.attach import install_from
                from proctor.instrument.guard import began_with

                began_with(_STDERR)
            install_from(activation)
        except Exception as e:  # noqa: BLE001 - the user's program starts regardless
            _say(f"{type(e).__name__}: {e}")

    wrapt.register_post_import_hook(on_torch, "torch")


try:
    _activate()
except ImportError:
    _say(f"proctor is not installed in {sys.executable}")
except Exception as e:  # noqa: BLE001 - the user's program starts regardless
    _say(f"{type(e).__name__}: {e}")
_chain()
