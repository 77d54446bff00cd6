"""Callbacks for training libraries: start recording from inside a program, and tell what its trainer knows.

One file a library, imported by who uses that library and by nobody else::

    from proctor.instrument.callbacks.transformers import ProctorCallback   # Trainer(callbacks=[ProctorCallback()])
    from proctor.instrument.callbacks.lightning import ProctorCallback      # Trainer(callbacks=[ProctorCallback()])
    from proctor.instrument.callbacks.accelerate import ProctorTracker      # Accelerator(log_with=[ProctorTracker()])
    TITAN_STRUCT_LOGGER_HANDLERS=proctor.instrument.callbacks.torchtitan.factory

None is needed for `proctor record`, and none does harm with it: the process is attached once, whoever comes first.
What the trainer knows is context under `trainer.…` keys (`session.Session.tell`); steps stay those that Proctor counts.
"""
