"""How tensors lie on ranks: the mesh, layouts, the plan and its file, layouts read off a program.

Recording, merging, judging, running and proving all read the same plan.
"""
