"""Long tests of random cases, of which a run of pytest takes a share.

A module that is no test is a command that runs as many as it is told: `python -m tests.soak.actions --programs 20000`.
"""
