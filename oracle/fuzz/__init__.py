"""A campaign that finds bugs in distributed libraries: generated models × generated settings, compared with one process (D3).

    proctor oracle fuzz --budget 10m -o DIR     draw models and settings, run them, report what is not the same computation
    proctor oracle fuzz replay FILE             one scenario of a finding once more

`spec` says what a scenario is; `models/` and `axes/` are templates and axes, one file each; `program` writes a scenario down as source text;
`worlds` runs it on ranks that stay, `rank` and `judge` compare it there with a reference; `cover`, `attribute`, `shrink` search;
`findings` tells signatures apart; `script` makes a stand-alone program of each; `report/` shows them.
"""
