"""The mutation matrix: silent bugs planted into healthy programs, and which of them Proctor finds and names.

    python -m benchmarks.mutants FOLDER [--sample N] [--seed S] [--write]      (FOLDER: the programs' checkouts)

An *operator* plants one kind of silent bug into any training program: by its syntax tree, into a copy of the source, or
in the process, by a start-up hook that wraps torch. A *mutant* is a program, an operator and a place. It counts only if the
bare program then trains otherwise (losses, parameters or what it saves) and still ends with exit code 0.
"""
