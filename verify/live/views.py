"""Views of a run's texts that every window of it needs, parsed once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from proctor.invariants.codec import signature
from proctor.invariants.codec.variable import Variable
from proctor.invariants.schema import Name
from proctor.invariants.trace import Trace, decode_variable, flat_meta, metas_frame, variables_frame


class Views:
    """Views of a trace's texts, which only grow: what was parsed for one window is lent to the next."""

    def __init__(self, texts: Mapping[Name, list[str]]) -> None:
        self._texts = texts
        self._functions: dict[str, int] = {}
        self._features: list[dict[str, signature.Plain]] = []
        self._left_out: dict[int, frozenset[str]] = {}
        self._variables: list[Variable] = []
        self._metas: list[dict[str, str]] = []
        self._frames: dict[str, tuple[int, pl.DataFrame]] = {}
        self._lasting: dict[Any, Any] = {}

    def lend(self, trace: Trace) -> None:
        trace.lasting = self._lasting
        functions, signatures = self._texts[Name.FUNCTION], self._texts[Name.SIGNATURE]
        for code in range(len(self._functions), len(functions)):
            self._functions[functions[code]] = code
        for code in range(len(self._features), len(signatures)):
            if missing := signature.left_out(signatures[code]):
                self._left_out[code] = missing
        trace.__dict__["left_out"] = self._left_out
        self._features += [signature.features(text) for text in signatures[len(self._features) :]]
        trace.__dict__["function_code"], trace.__dict__["features"] = self._functions, self._features
        variables, metas = self._texts[Name.VARIABLE], self._texts[Name.META]
        self._variables += [decode_variable(text) for text in variables[len(self._variables) :]]
        self._metas += [flat_meta(text) for text in metas[len(self._metas) :]]
        for view, known in (("variables", self._variables), ("metas", self._metas)):
            size, frame = self._frames.get(view, (-1, pl.DataFrame()))
            if size != len(known):
                frame = variables_frame(self._variables) if view == "variables" else metas_frame(self._metas)
                self._frames[view] = len(known), frame
            trace.__dict__[view] = frame
