"""Runs training programs of Keras: one JSON object a line in, one a line out. It is given to an interpreter that has Keras as a file of its own, and needs Keras and TensorFlow alone.

In: {"text": source of a program with `train(world)`, "world": replicas, 0 for no strategy, "folder": where it may save}, or {"ask": "catalogue"}.
Out: {"seen": [{"kind", "name", "dtype", "shape", "data"}, …], "apart": a tensor whose replicas differ, or ""}, {"raised": {"type", "message", "where", "traceback"}}, or the catalogue.
"""

import base64
import ctypes
import faulthandler
import gc
import inspect
import json
import os
import re
import signal
import sys
import traceback
from typing import Any

os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="4", TF_ENABLE_ONEDNN_OPTS="0")
DEVICES = 4


def start() -> Any:
    """Import Keras, make the devices; gives where answers go."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it goes with who started it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import keras
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    keras.config.disable_traceback_filtering()
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    return answers


def catalogue() -> dict[str, Any]:
    """Optimizers of the library with their arguments and defaults, arguments of `compile`, versions."""
    import keras
    import tensorflow as tf

    found = {}
    for name in sorted(dir(keras.optimizers)):
        cls = getattr(keras.optimizers, name)
        if isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer) and cls is not keras.optimizers.Optimizer:
            arguments = list(inspect.signature(cls).parameters.values())
            found[name] = {p.name: plain(p.default) for p in arguments if p.kind is not p.VAR_KEYWORD}
    given = inspect.signature(keras.Model.compile).parameters.values()
    return {"versions": {"keras": keras.__version__, "tensorflow": tf.__version__}, "optimizers": found, "compile": {p.name: plain(p.default) for p in given if p.name != "self"}}


def plain(default: Any) -> Any:
    """A default as JSON; "required" where there is none, "?" where it is an object."""
    if default is inspect.Parameter.empty:
        return "required"
    if isinstance(default, tuple):
        return list(default)
    return default if default is None or isinstance(default, (bool, int, float, str)) else "?"


def carried(kind: str, name: str, value: Any) -> dict[str, Any]:
    """A tensor as JSON."""
    import numpy as np

    array = np.asarray(value)
    array = array.astype("int64" if array.dtype.kind in "biu" else "float64")
    return {"kind": kind, "name": name, "dtype": str(array.dtype), "shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode()}


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Run a program once; what it gives, as JSON."""
    import keras

    keras.utils.clear_session(free_memory=False)
    names: dict[str, Any] = {"__name__": "fuzzed", "FOLDER": task["folder"]}
    if task.get("plant"):
        exec(task["plant"], {"__name__": "planted"})
    exec(compile(task["text"], "<scenario>", "exec"), names)
    seen = names["train"](task["world"])
    return {"seen": [carried(kind, name, value) for (kind, name), value in seen.items()], "apart": apart(names.get("net"))}


def apart(net: Any) -> str:
    """The first weight whose replicas are not the same bits; "" if all agree."""
    import numpy as np

    for variable in [*net.trainable_weights, *(net.optimizer.variables if net.optimizer is not None else [])] if net is not None else []:
        parts = [np.asarray(part).tobytes() for part in getattr(variable.value, "values", ())]
        if len(set(parts)) > 1:
            return str(variable.path)
    return ""


def described(error: Exception) -> dict[str, str]:
    """An exception as JSON: its type, what it says, the innermost frame in a library."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages/" in f.filename and "site-packages/proctor/" not in f.filename]
    library = [f for f in frames if "tensorflow/python/util/traceback_utils" not in f.filename and "keras/src/utils/traceback_utils" not in f.filename] or frames
    where = f"{library[-1].filename.rpartition('site-packages/')[2]}:{library[-1].name}" if library else ""
    text = "".join(traceback.format_exception(error))
    return {"type": type(error).__name__, "message": message(str(error))[:2000], "where": where, "traceback": text[-6000:]}


def message(text: str) -> str:
    """What an exception says, without where TensorFlow's graph was made: the first line behind the last frame that is told."""
    text = re.sub(r"\x1b\[\d*m", "", text)
    if wrapped := re.search(r"Exception encountered when calling [^\n]*\n\n(.+?)(?=\n\nArguments received by|\Z)", text, re.S):
        text = wrapped[1]
    text = re.sub(r"\{\{[^{}]*\}\}|\[Op:[^\]]*\]|\[\[[^\[\]]*\]\]", "", text)
    lines = [line for line in text.splitlines() if line.strip()]
    frames = [i for i, line in enumerate(lines) if re.match(r'\s*File "', line)]
    if frames:
        lines = [line for line in lines[frames[-1] + 1 :] if not line.startswith("    ") and not re.match(r"\(\d+\)|\d+ (root|successful)|Original stack|Node:|Detected at", line)] or lines
    return "\n".join(lines).strip()


def main() -> None:
    answers = start()
    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer = catalogue() if task.get("ask") == "catalogue" else run(task)
        except Exception as error:  # noqa: BLE001  it is what is asked for
            answer = {"raised": described(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        gc.collect()


if __name__ == "__main__":
    main()
