"""A kept step of a job (its capsules) done again by a trusted reference: the same state, the same data, the same results?"""
