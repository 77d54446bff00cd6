// Rows of a trace as an Arrow record batch: metadata from a template, and the buffers one after the other, each padded to 8 bytes.
//
// Every flush of every rank passes here, many times a second, on the training process's time: conversions go straight from
// Python's integers to the bytes, and no array or buffer object is made in between. Which bytes: invariants/wire/arrow_message.py.
//
// Columns by one letter each: B u8, i i32, I u32, q i64, Q u64, f f32, d f64, ? bits (least significant first), s text
// (int32 offsets, then UTF-8; what is no Unicode becomes '?'). No value is missing.
// GIL: held throughout. Threads: no state.
#pragma once

#include <pybind11/pybind11.h>

namespace proctor {

void bind_columns(pybind11::module_& m);

}  // namespace proctor

using proctor::bind_columns;
