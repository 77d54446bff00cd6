"""Source text of a training program of Keras: what the server executes, and what a finding's script contains.

`train(world)` makes the model within the scope of a strategy over `world` logical CPUs (0: no strategy), trains it and gives everything that is compared: (kind, name) → value. Values of weights
come from their place in the model and are never trivial.
"""

from __future__ import annotations

from typing import Final

from proctor.oracle.fuzz.axes import axis_of, whole
from proctor.oracle.fuzz.keras.draft import KerasDraft
from proctor.oracle.fuzz.models import template_of
from proctor.oracle.fuzz.spec import Scenario

IMPORTS: Final = ("import os", "os.environ.update(KERAS_BACKEND='tensorflow', CUDA_VISIBLE_DEVICES='-1', TF_CPP_MIN_LOG_LEVEL='3')",
                  "import keras, numpy as np, tensorflow as tf", "from keras import layers")  # fmt: skip
EVEN: Final = 12  # rows of a batch: 2, 3 and 4 divide it. What it is that they do not is an axis, so that findings name it
RATES: Final = {"Adadelta": "1.0", "Lion": "0.05", "Muon": "0.05"}


ASKED: Final = ("predicted", "evaluated")  # what a trained model is asked besides


def program(scenario: Scenario, *, permuted: int = 0, asked: tuple[str, ...] = ()) -> tuple[tuple[str, ...], ...]:
    """Write a scenario down: imports, model, making, data, training.

    Args:
        scenario: valid.
        permuted: a seed by which rows of each batch are dealt in another order, and moved by a rounding; 0 for as they are.
        asked: of `ASKED`, besides what the setting says: of a reference both, since settings of one program share it.
    """
    draft = _draft(scenario)
    return (IMPORTS, draft.code.net, _make(draft), _data(draft, int(str(scenario.given("seed"))), permuted), _train(draft, permuted, asked))


def text(scenario: Scenario, *, permuted: int = 0, asked: tuple[str, ...] = ()) -> str:
    """The whole."""
    return "\n".join(line for part in program(scenario, permuted=permuted, asked=asked) for line in part) + "\n"


def replicas(scenario: Scenario) -> int:
    """Replicas of the strategy; 0 without one."""
    return scenario.world if "wrapper" in scenario.setting else 0


def _draft(scenario: Scenario) -> KerasDraft:
    draft = KerasDraft(template_of(scenario.template).code(scenario.model), int(str(scenario.given("steps"))), EVEN * (1 + (int(str(scenario.given("batch"))) > 6)))
    given = whole(scenario.setting)
    for axis in sorted((axis_of(name) for name in scenario.setting), key=lambda a: (a.order, a.name)):
        axis.apply(scenario.setting[axis.name], draft, given)
    return draft


def _make(draft: KerasDraft) -> tuple[str, ...]:
    rate = {"learning_rate": draft.rate if draft.rate != "0.1" else RATES.get(draft.optimizer, "0.1")}
    options = ", ".join(f"{k}={v}" for k, v in {**rate, **draft.options}.items())
    compiling = ", ".join(f"{k}={v}" for k, v in draft.compiling.items())
    optimizer = draft.around.format(f"keras.optimizers.{draft.optimizer}({options})")
    return (
        "def make():",
        "    net = model()",
        "    for i, w in enumerate(w for w in net.weights if 'float' in w.dtype):",
        "        value = np.random.RandomState(i + 1).randn(*w.shape) / (np.prod(w.shape[:-1]) ** 0.5 if len(w.shape) > 1 else 2) + 0.5 * (len(w.shape) < 2)",
        "        w.assign(np.abs(value) + 0.1 if 'variance' in w.path else value)",
        f"    net.compile(optimizer={optimizer}, {compiling})",
        "    return net",
    )


# TensorFlow takes an array without a copy where it begins at a multiple of 64 bytes, and numpy's begin there by chance.
_ALIGNED: Final = (
    "def aligned(t):",
    "    room = np.zeros(t.nbytes + 64, 'u1')",
    "    part = room[-room.ctypes.data % 64:][:t.nbytes].view(t.dtype).reshape(t.shape)",
    "    part[...] = t",
    "    return part",
)


def _data(draft: KerasDraft, seed: int, permuted: int) -> tuple[str, ...]:
    rows = draft.batch * draft.steps + draft.tail
    shape = ", ".join(map(str, draft.code.y))
    lines = [*_ALIGNED, "def data():", f"    n, rng = {rows}, np.random.RandomState({100 + seed})", f"    x, y = {draft.code.x}, rng.randn(n, {shape})"]
    if draft.weights:
        lines.append(f"    weight = {draft.weights}")
    if permuted:
        single = "float32" if "float32" in draft.policy[0] else "float64"
        names = ("x", "y", *(["weight"] if draft.weights else []))
        lines += [
            "    global order",
            f"    shake, size = np.random.RandomState({permuted}), {draft.batch}",
            "    order = np.concatenate([i + shake.permutation(min(size, n - i)) for i in range(0, n, size)])",
            f"    move = lambda t: t * (1 + 8 * np.finfo('{single}').eps * shake.choice([-1, 1], t.shape)) if t.dtype.kind == 'f' else t",
            f"    {', '.join(names)} = {', '.join(f'move({name}[order])' for name in names)}",
        ]
    given = f"x, y{', weight' if draft.weights else ''}"
    return (*lines, f"    return [aligned(t) for t in ({given})]")


def _train(draft: KerasDraft, permuted: int, asked: tuple[str, ...]) -> tuple[str, ...]:
    names = "x, y, weight" if draft.weights else "x, y"
    lines = ["global net", *draft.policy, f"{names} = whole = data()"]
    if draft.save:
        parts = ", ".join(f"{name}[:{draft.batch}]" for name in names.split(", "))
        rest = ", ".join(f"{name}[{draft.batch}:]" for name in names.split(", "))
        lines += [
            *_strategy(draft, str(draft.before) if draft.before >= 0 else "world"),
            *_within("net = make()"),
            f"given = {parts}",
            *_calls(draft, draft.batch),
            "first = logs",
            *_saved(draft),
            f"given = {rest}",
            *_calls(draft, draft.batch),
            f"logs = {{k: (first[k] + {draft.steps - 1} * logs[k]) / {draft.steps} for k in logs}}",
        ]
    else:
        lines += [*_strategy(draft, "world"), *_within("net = make()"), f"given = {names}", *_calls(draft, draft.batch)]
    back = ["seen['evaluation', 'predicted'] = np.asarray(seen['evaluation', 'predicted'])[np.argsort(order)]"] if permuted and "predicted" in asked else []
    lines += [
        "seen = {('output', k): v for k, v in logs.items()}",
        "for kind, those in ('state', net.optimizer.variables), ('parameter', net.trainable_weights), ('buffer', net.non_trainable_weights):",
        "    seen.update({(kind, f'{i} {w.path}' if kind != 'state' else str(i)): np.array(keras.ops.cast(w, 'float64')) for i, w in enumerate(those)})",
        "seen['output', 'change of the data'] = max(np.abs(t - t0).max() for t, t0 in zip(whole, data()))",
        *_asked(draft, asked),
        *back,
        "return seen",
    ]
    return ("def train(world):", *(f"    {line}" for line in lines))


def _named(draft: KerasDraft) -> str:
    return "x, y, sample_weight=weight" if draft.weights else "x, y"


def _asked(draft: KerasDraft, asked: tuple[str, ...]) -> list[str]:
    predict = draft.predict or (f"net.predict(x, batch_size={draft.batch}, verbose=0)" if "predicted" in asked else "")
    evaluate = draft.evaluate or (f"net.evaluate({_named(draft)}, batch_size={draft.batch}, verbose=0)" if "evaluated" in asked else "")
    return [f"seen['evaluation', '{name}'] = {how}" for name, how in zip(ASKED, (predict, evaluate), strict=True) if how]


def _strategy(draft: KerasDraft, world: str) -> list[str]:
    if not draft.distributed:
        return ["strategy = tf.distribute.get_strategy()"]
    return [f"strategy = tf.distribute.MirroredStrategy([f'CPU:{{i}}' for i in range({world})], tf.distribute.ReductionToOneDevice())"]


def _within(line: str) -> list[str]:
    return ["with strategy.scope():", f"    {line}"]


def _saved(draft: KerasDraft) -> list[str]:
    """Save, and go on with another model that loads it, under the strategy that is asked for."""
    strategy = _strategy(draft, "world") if draft.before >= 0 else []
    if draft.save == "keras":
        return ["net.save(FOLDER + '/net.keras')", *strategy, *_within("net = keras.models.load_model(FOLDER + '/net.keras')")]
    if draft.save == "weights":
        return ["net.save_weights(FOLDER + '/net.weights.h5')", *strategy, *_within("net = make()"), "net.load_weights(FOLDER + '/net.weights.h5')"]
    if draft.save == "config":
        return [
            "config, weights, state = keras.saving.serialize_keras_object(net), net.get_weights(), [np.array(v) for v in net.optimizer.variables]", *strategy,
            *_within("net = keras.saving.deserialize_keras_object(config)"), "net.set_weights(weights)", "net.optimizer.build(net.trainable_weights)",
            "for v, value in zip(net.optimizer.variables, state): v.assign(value)",
        ]
    return [
        "path = tf.train.Checkpoint(net=net, optimizer=net.optimizer).save(FOLDER + '/point')", *strategy, *_within("net = make()"),
        *_within("net.optimizer.build(net.trainable_weights)"), "tf.train.Checkpoint(net=net, optimizer=net.optimizer).restore(path).assert_existing_objects_matched()",
    ]


def _calls(draft: KerasDraft, size: int) -> list[str]:
    """Train on `given`; `logs` is what it says."""
    if draft.call == "train_on_batch":
        return [
            f"steps = [net.train_on_batch(*(t[i:i + {size}] for t in given), return_dict=True) for i in range(0, len(given[0]), {size})]",
            "logs = {k: np.mean([step[k] for step in steps]) for k in steps[0]}",
        ]
    if draft.call == "run":
        return _loop(draft, size)
    feed = {
        "arrays": [f"logs = net.fit(*given[:2], {'sample_weight=given[2], ' if draft.weights else ''}batch_size={size}, shuffle=False, verbose=0).history"],
        "dataset": [f"dataset = tf.data.Dataset.from_tensor_slices(given).batch({size})", "logs = net.fit(dataset, verbose=0).history"],
        "distributed": [
            f"dataset = tf.data.Dataset.from_tensor_slices(given).batch({size})", f"steps = -(-len(given[0]) // {size})",
            "logs = net.fit(strategy.experimental_distribute_dataset(dataset), steps_per_epoch=steps, verbose=0).history",
        ],
        "sequence": [
            "class Rows(keras.utils.PyDataset):", f"    def __len__(self): return -(-len(given[0]) // {size})", f"    def __getitem__(self, i): return tuple(t[i * {size}:(i + 1) * {size}] for t in given)",
            "logs = net.fit(Rows(), shuffle=False, verbose=0).history",
        ],
    }[draft.feed]  # fmt: skip
    return [*feed, "logs = {k: v[-1] for k, v in logs.items()}"]


def _loop(draft: KerasDraft, size: int) -> list[str]:
    """A loop by hand, as the guide of `tf.distribute` has it: each replica's loss is its share of the mean over the global batch."""
    return [
        "@tf.function",
        "def step(x, y):",
        "    with tf.GradientTape() as tape:",
        f"        loss = tf.reduce_sum((net(x, training=True) - tf.cast(y, net.compute_dtype)) ** 2) / {size * _size(draft)} + sum(net.losses) / strategy.num_replicas_in_sync",
        "    net.optimizer.apply_gradients(zip(tape.gradient(loss, net.trainable_weights), net.trainable_weights))",
        "    return loss",
        f"dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(given).batch({size}))",
        "step_all = tf.function(lambda x, y: strategy.reduce('SUM', strategy.run(step, args=(x, y)), axis=None))",
        "logs = {'loss': np.mean([step_all(x, y).numpy() for x, y in dataset])}",
    ]


def _size(draft: KerasDraft) -> int:
    size = 1
    for one in draft.code.y:
        size *= one
    return size
