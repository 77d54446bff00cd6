"""Keras 3 on TensorFlow: no strategy against `MirroredStrategy` over logical CPUs, in a process and an environment of its own.

`server.py` runs in the interpreter that has Keras and needs nothing of Proctor; `client` starts it and talks to it. `catalogue` is what was read off the library, `axes` and `models` are
settings and templates, `program` writes a scenario down as text, `runner` compares, `script` makes a stand-alone program of a finding. The search is that of the other libraries.
"""
