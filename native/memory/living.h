// Of the objects that the garbage collector knows, those of a type: modules, and containers that may hold a copy of a model.
//
// A program may have millions of objects (a data set as a list of tuples); a look at each in Python takes a training step several times over. Nothing of the
// program's own runs: types and lengths are read where C keeps them, and a key of a plain mapping is looked up as a string.
// GIL: needed. Twin: twins/living.py.
#pragma once

#include <pybind11/pybind11.h>

namespace proctor {

void bind_living(pybind11::module_& m);

}  // namespace proctor
