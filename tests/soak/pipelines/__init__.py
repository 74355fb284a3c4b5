"""Random programs of pipelines whose stages are sharded, beside the plain model: `python -m tests.soak.pipelines`.

programs    what a program is, and how one is drawn       stages    what a stage computes, and how it is sharded
play        plays a program on both sides and judges      soak      the command
"""
