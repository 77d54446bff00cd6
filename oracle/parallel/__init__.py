"""A plan that also runs the model: parameters cut, random numbers of one device, transitions where the plan says."""
