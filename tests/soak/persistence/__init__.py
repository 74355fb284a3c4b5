"""Random programs of what users do to keep, move and get back the state of a training: `python -m tests.soak.persistence`.

programs    what a program is, and how one is drawn       models    what is trained
run         a model in training, sharded or as the twin   kept      how its state is kept, and given to another run
faults      errors of torch and of the file system        play      plays a program beside its twin and judges it
values      compared                                      soak      the command
"""
