"""Random programs of what users do with optimizers and their states: `python -m tests.soak.optimizers`.

programs    what a program is, and how one is drawn       models    what is trained, and how it is sharded
sides       a model with its optimizers; its twin         states    how states are kept, loaded, brought to another mesh
play        plays a program on both sides and judges      soak      the command
"""
