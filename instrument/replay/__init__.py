"""The step of a capsule is done again: `again` starts and judges it, `inside` runs within it, `plan` is what they say to each other."""
