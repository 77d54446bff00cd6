"""TrainCheck's traces become runs, its invariants become packs.

`run.import_run` reads the folder that `traincheck-collect` wrote, `rules.import_rules` the file of `traincheck-infer`.
Rules keep the meaning that TrainCheck's checker gives them (`proctor.invariants.relations.traincheck`).
"""
