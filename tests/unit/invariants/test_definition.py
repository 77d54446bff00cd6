"""`train` of one script is `train` of another when it is the same function, or nearly."""

from __future__ import annotations

import types

from proctor.invariants.codec.definition import foreign, same, sketch_of

TRAIN = """
def train(model, loader, optimizer, device, epochs=3):
    model.train()
    for epoch in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            history.append(loss.item())
    return history
"""
UNRELATED = """
def train(config):
    agent = Agent(config.actions)
    for episode in range(config.episodes):
        state = environment.reset()
        while not environment.done:
            action = agent.act(state)
            state, reward = environment.play(action)
            memory.push(state, action, reward)
        agent.learn(memory.sample(config.batch))
"""
NET = """
class Net(Base):
    def __init__(self, width=8, depth=2):
        super().__init__()
        self.stem = Linear(4, width)
        self.blocks = ModuleList([Linear(width, width) for _ in range(depth)])
        self.head = Linear(width, 3)
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = relu(block(x))
        return self.head(x)
"""
CONVOLVED = """
class Net(Base):
    def __init__(self):
        super().__init__()
        self.conv1 = Conv2d(1, 8, 3)
        self.pool = MaxPool2d(2)
        self.dropout = Dropout()
        self.fc = Linear(128, 10)
    def forward(self, images):
        return log_softmax(self.fc(self.dropout(self.pool(self.conv1(images)).flatten(1))), dim=1)
"""


def made(source: str) -> str:
    space: dict[str, object] = {"Base": object}
    exec(source, space)
    return sketch_of(next(v for k, v in space.items() if k in ("train", "Net", "Wrapped")))


def test_another_size_seed_or_option_is_the_same_thing() -> None:
    assert same(made(TRAIN), made(TRAIN.replace("epochs=3", "epochs=900")))
    assert same(made(NET), made(NET.replace("width=8, depth=2", "width=512, depth=48")))


def test_a_repaired_function_is_the_same_thing() -> None:
    for line in ("    model.train()\n", "            optimizer.zero_grad()\n", "            history.append(loss.item())\n"):
        assert line in TRAIN
        assert same(made(TRAIN), made(TRAIN.replace(line, "")))
    assert same(made(TRAIN), made(TRAIN.replace("loss.backward()", "(loss / accumulate).backward(); clip(model.parameters())")))


def test_one_name_of_two_programs_is_two_things() -> None:
    assert not same(made(TRAIN), made(UNRELATED))
    assert not same(made(NET), made(CONVOLVED))


def test_what_is_decorated_is_what_it_decorates() -> None:
    def plain(model, loader, optimizer, loss):  # type: ignore[no-untyped-def]
        return model, loader, optimizer, loss

    def wrapper(*args, **kwargs):  # type: ignore[no-untyped-def]
        return args, kwargs

    wrapper.__wrapped__ = plain  # type: ignore[attr-defined]
    assert sketch_of(wrapper) == sketch_of(plain) != ""


def test_too_little_to_tell_and_what_is_unknown_tell_nothing() -> None:
    assert sketch_of(lambda x: x) == ""
    assert sketch_of(types.SimpleNamespace) == ""
    assert same("", made(TRAIN)) and same(made(TRAIN), "")
    here = {"__main__.train": made(UNRELATED)}
    assert foreign([("__main__.train", [made(TRAIN)])], here) == "__main__.train"
    assert foreign([("__main__.train", [made(TRAIN), made(UNRELATED)])], here) == ""
    assert foreign([("__main__.other", [made(TRAIN)])], here) == ""
    assert foreign([("__main__.train", [made(TRAIN)])], {}) == ""
